"""The commands `score`, `info` and `parity`: options, tables and exit codes.

Exit code 2 means that the call or its input has to be changed, 1 that the run failed; both come with one line on
standard error.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import xlogprobs
from xlogprobs import parity as parity_matrix
from xlogprobs.accurate import Array
from xlogprobs.scoring import Library, Scores, check_output, write_scores
from xlogprobs.scoring import score as score_stored
from xlogprobs.stored import InputError, open_logits

app = typer.Typer(
    help="Log-probabilities of tokens, exact to 1e-6, on NumPy, torch, JAX and any array-API library.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"xlogprobs {xlogprobs.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    pass


@app.command()
def score(
    file: Annotated[
        Path, typer.Argument(help="A .safetensors or .npz file with `logits` (..., V) and `ids` (...), or logits.npy.")
    ],
    ids: Annotated[Path | None, typer.Option(help="The .npy file of the ids that go with logits.npy.")] = None,
    backend: Annotated[Library, typer.Option(help="The array library that computes.")] = Library.NUMPY,
    temperature: Annotated[float, typer.Option(help="Divides the logits.")] = 1.0,
    ignore_index: Annotated[
        int | None, typer.Option(help="The id of positions to leave out, such as -100.", show_default="none")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write `logprobs` and `ids` to this .safetensors or .npz file."),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=0, help="How many positions to show: of more, the first and last ones.")
    ] = 64,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress bar (there is none either outside a terminal).")
    ] = False,
) -> None:
    """Log-probability of each id under stored logits, with their sum, mean and perplexity.

    The logits are memory-mapped and read in pieces, so a file may be larger than the memory. A compressed .npz member
    cannot be mapped: it is decompressed in pieces.
    """
    with _one_line_errors():
        stored = open_logits(file, ids)
        tokens = stored.tokens()
        if output is not None:
            check_output(output, *filter(None, (file, ids)))
        start = time.perf_counter()
        with _progress("scoring", quiet) as progress:
            task = progress.add_task("", total=stored.ids.size)
            scores = score_stored(
                stored,
                backend=backend,
                temperature=temperature,
                ignore_index=ignore_index,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
        seconds = time.perf_counter() - start
        if output is not None:
            write_scores(output, scores)
    console = Console()
    if rows and scores.ids.size:
        head, tail = _ends(scores.ids.size, rows)
        console.print(_positions(scores, tokens, head, tail, console))
        if left_out := scores.ids.size - head - tail:
            console.print(
                f"{left_out:,} positions after the first {head:,} left out; --rows {scores.ids.size} shows all",
                highlight=False,
            )
    console.print(_totals(scores, seconds, output))


@app.command()
def info() -> None:
    """Which backends are installed, the devices each sees, and how it would run."""
    table = Table("backend", "version", "devices", "runs as", "why not")
    for backend in xlogprobs.backends():
        table.add_row(
            *map(
                Text,
                (
                    backend.name,
                    backend.version or ("-" if backend.installed else "not installed"),
                    ", ".join(backend.devices) or "-",
                    backend.execution or "-",
                    backend.why_not or "",
                ),
            )
        )
    Console().print(table)


@app.command()
def parity(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rows and vocabularies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Measure every backend that runs here against float64 and against each other.

    The exit code is 1 if any result is outside the bound.
    """
    with _progress("measuring", quiet) as progress:
        task = progress.add_task("", total=None)
        cells = parity_matrix.measure(
            quick, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    if as_json:
        typer.echo(parity_matrix.to_json(cells))
    else:
        Console().print(parity_matrix.table(cells))
    if any(cell.status == "FAIL" for cell in cells):
        raise typer.Exit(1)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        _fail(error, 2)
    except (ImportError, OSError, MemoryError) as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    message = " ".join(str(error).split()) or type(error).__name__
    typer.echo(f"xlogprobs: {message}", err=True)
    raise typer.Exit(code) from error


def _progress(what: str, quiet: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


def _positions(scores: Scores, tokens: list[str] | None, head: int, tail: int, console: Console) -> Table:
    shape, size = scores.ids.shape, scores.ids.size
    table = Table("position", "id", *(["token"] if tokens else []), "logprob")
    for column in table.columns:
        column.justify = "left" if column.header == "token" else "right"
    flat_ids, logprobs, ignored = scores.ids.reshape(-1), scores.logprobs.reshape(-1), scores.ignored.reshape(-1)
    shown = repr if console.encoding.startswith("utf") else ascii
    for i in (*range(head), *range(size - tail, size)):
        token = [Text(shown(tokens[i]), overflow="fold")] if tokens else []
        value = "ignored" if ignored[i] else logprob_text(logprobs[i])
        table.add_row(_position(i, shape), str(flat_ids[i]), *token, value, end_section=i == head - 1 and tail > 0)
    return table


def _ends(size: int, rows: int) -> tuple[int, int]:
    """How many positions of ``size`` to show at the head and at the tail to make ``rows``."""
    return (size, 0) if size <= rows else (rows - rows // 2, rows // 2)


def _position(index: int, shape: tuple[int, ...]) -> str:
    if len(shape) < 2:
        return str(index)
    place = []
    for length in reversed(shape):
        index, rest = divmod(index, length)
        place.append(str(rest))
    return f"({', '.join(reversed(place))})"


def logprob_text(value: Array) -> str:
    """A log-probability with 6 decimals, or with 4 digits and an exponent where decimals would hide it.

    >>> logprob_text(-12.25), logprob_text(-7.5e-05), logprob_text(0.0)
    ('-12.250000', '-7.500e-05', '0.000000')
    """
    return f"{value:.6f}" if value == 0 or 1e-3 <= abs(value) < 1e6 or abs(value) == float("inf") else f"{value:.3e}"


def _totals(scores: Scores, seconds: float, output: Path | None) -> Table:
    ignored = scores.ids.size - scores.positions
    table = Table.grid(padding=(0, 2))
    table.add_row("sum", logprob_text(scores.sum))
    table.add_row("mean", logprob_text(scores.mean))
    table.add_row("perplexity", f"{scores.perplexity:.6g}")
    table.add_row("positions", f"{scores.positions:,}" + (f" ({ignored:,} ignored)" if ignored else ""))
    table.add_row("time", f"{seconds:.3f} s")
    if output is not None:
        table.add_row("written to", Text(str(output), overflow="fold"))
    return table
