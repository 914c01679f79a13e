"""JAX: the core under jax.jit, behind a custom_jvp whose tangent is rematerialised.

Works eagerly and inside the user's own jit, vmap, scan and shard_map; needs no x64: where float64 is off, the wide
arithmetic is float32 pairs.
"""

from xlogprobs_jax.backend import JaxBackend

__all__ = ["JaxBackend"]
