"""The `slipstream` command. Heavy rooms are imported inside the commands, so `--help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from slipstream.errors import InvalidRequest, SlipstreamError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Exact speculative decoding: generate, measure, decide.",
)


@app.command(epilog="Example: `slipstream generate 'Name three rivers.' --drafter ngram:3 --stats`")
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; `-` reads standard input.")],
    model: Annotated[str, typer.Option(help="Embedded name, model folder or .gguf file.")] = (
        "smollm2-135m"
    ),
    drafter: Annotated[str, typer.Option(help="none, ngram:3, suffix, draft_model:PATH:4.")] = "none",
    max_tokens: Annotated[int, typer.Option(help="Most output tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print what the steps did.")] = False,
) -> None:
    """Answer one prompt, streaming the text."""
    from slipstream.engine import LLM
    from slipstream.types import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=tuple(stop or ())
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise InvalidRequest("The prompt is empty; give some text, or - to read standard input.")
    llm = LLM(model, drafter=drafter, dtype=dtype, max_users=1)
    chat = not raw and bool(llm.tokenizer.chat_template)
    completion = None
    for output in llm.stream([{"role": "user", "content": text}] if chat else text, params):
        typer.echo(output.text, nl=False)
        completion = output.completion or completion
    typer.echo()
    assert completion is not None
    if completion.error:
        raise SlipstreamError(completion.error)
    if stats:
        _print_stats(llm.drafter.name, completion)


def _print_stats(drafter: str, completion: object) -> None:
    from slipstream import metrics
    from slipstream.types import Completion

    assert isinstance(completion, Completion)
    found = metrics.acceptance(completion.records)
    tpot = metrics.tpot(completion.timings)
    stages = metrics.stage_totals(completion.records)

    def show(value: float | None, unit: str = "") -> str:
        return "-" if value is None else f"{value:.2f}{unit}"

    typer.echo(
        f"\n{drafter}: {len(completion.token_ids)} tokens ({completion.finish_reason.value}), "
        f"{show(tpot and tpot * 1e3, ' ms/token')}, "
        f"{show(found.tokens_per_step)} tokens per step, "
        f"acceptance rate {show(found.acceptance_rate)}; "
        f"draft {stages.draft:.3f} s, verify {stages.verify:.3f} s, "
        f"sample {stages.sample:.3f} s, host {stages.host:.3f} s",
        err=True,
    )


@app.command(epilog="Example: `slipstream doctor`")
def doctor() -> None:
    """Check the machine, then run every drafter and gate on tiny models, in under a minute."""
    from slipstream.lab.doctor import run_doctor

    if not run_doctor(typer.echo):
        raise typer.Exit(1)


def main() -> NoReturn:
    """Entry point: one clear sentence and the right exit code for every user mistake."""
    try:
        app(standalone_mode=False)
    except SlipstreamError as error:
        typer.echo(f"slipstream: {error}", err=True)
        sys.exit(error.exit_code)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("slipstream: interrupted; what was written is kept.", err=True)
        sys.exit(130)
    sys.exit(0)
