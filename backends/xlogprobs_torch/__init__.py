"""torch: the core under torch.compile, behind an autograd boundary that saves the logits and two numbers a row."""

from xlogprobs_torch.backend import TorchBackend

__all__ = ["TorchBackend"]
