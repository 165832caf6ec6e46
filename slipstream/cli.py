"""The `slipstream` command. Heavy rooms are imported inside the commands, so `--help` is quick."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from typer.core import TyperGroup

from slipstream.errors import InvalidConfig, InvalidRequest, SlipstreamError

if TYPE_CHECKING:
    from slipstream.lab.results import GridResult
    from slipstream.types import Completion


_T = TypeVar("_T")


class _OneSentence(TyperGroup):
    """Every user mistake is one clear sentence and the right exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; see the class."""
        try:
            return super().invoke(ctx)
        except SlipstreamError as error:
            typer.echo(f"slipstream: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            typer.echo("slipstream: interrupted; what was written is kept.", err=True)
            raise typer.Exit(130) from error


app = typer.Typer(
    cls=_OneSentence,
    pretty_exceptions_enable=False,
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
    drafter: Annotated[
        str,
        typer.Option(help="none, ngram:3, suffix, mtp:2 (as shipped), METHOD:PATH:4, ..."),
    ] = "none",
    max_tokens: Annotated[int, typer.Option(help="Most output tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if any.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text; no chat template.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print what the steps did.")] = False,
) -> None:
    """Answer one prompt, streaming the text."""
    from slipstream.engine import LLM
    from slipstream.types import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise InvalidRequest("The prompt is empty; give some text, or - to read standard input.")
    llm = LLM(model, drafter=drafter, dtype=dtype, device=device, max_users=1)
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


def _print_stats(drafter: str, completion: Completion) -> None:
    from slipstream import metrics

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


@app.command(epilog="Example: `slipstream grid spec_quick --prompts my_traffic.jsonl`")
def grid(
    name: Annotated[
        str, typer.Argument(help="A grid in bench/grids, or a path to a TOML file.")
    ] = ("spec_quick"),
    prompts: Annotated[
        Path | None, typer.Option(help="Your own traffic: JSONL of OpenAI messages or text.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew instead of resuming an unfinished run.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The smallest run of its shape.")] = False,
) -> None:
    """Measure every arm of a grid against its baseline; print the table, write the report."""
    from slipstream.lab.grid import load
    from slipstream.lab.progress import watch
    from slipstream.lab.runner import run_grid

    plan = load(name)
    with watch() as on_event:
        directory = run_grid(
            plan, root=runs, resume=not fresh, prompts_file=prompts, quick=quick, on_event=on_event
        )
    _report(directory)


@app.command(epilog="Example: `slipstream report runs/20261130-101500-spec_quick`")
def report(
    run: Annotated[
        str, typer.Argument(help="A run's folder, a result.json, or `article` for the reference.")
    ] = "latest",
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    out: Annotated[
        Path | None, typer.Option(help="Folder to write report.md and .html to.")
    ] = None,
) -> None:
    """Analyze a ledger again; print its table and write report.md and report.html."""
    if run == "article":
        from slipstream.lab.reference import load_reference

        _show(load_reference(), out or Path("runs") / "article")
    elif run.endswith(".json"):
        from slipstream.lab.results_json import load_result

        _show(load_result(Path(run)), out or Path(run).parent)
    else:
        _report(_run_directory(run, runs), out)


def _run_directory(run: str, runs: Path) -> Path:
    if run != "latest":
        return Path(run)
    found = sorted(p.parent for p in runs.glob("*/ledger.jsonl"))
    if not found:
        raise InvalidConfig(f"There is no run in {runs}; start one with `slipstream grid`.")
    return found[-1]


def _report(directory: Path, out: Path | None = None) -> None:
    from slipstream.lab.analyze import analyze
    from slipstream.lab.results_json import save_result

    result = analyze(directory)
    _show(result, out or directory)
    save_result(result, (out or directory) / "result.json")


def _show(result: GridResult, folder: Path) -> None:
    from rich.console import Console

    from slipstream.lab.report import render_markdown, render_terminal
    from slipstream.lab.report_html import render_html

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(render_markdown(result), encoding="utf-8")
    (folder / "report.html").write_text(render_html(result), encoding="utf-8")
    Console().print(render_terminal(result))
    typer.echo(f"Report: {folder / 'report.md'} and {folder / 'report.html'}")


@app.command(
    epilog="Example: `slipstream cost config.json --drafter none --drafter mtp:3 --acceptance 2`"
)
def cost(
    config: Annotated[Path, typer.Argument(help="A Hugging Face config.json; no weights needed.")],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="none, ngram:3, suffix, mtp:3, eagle3:4, dflash:7, dflash2:7, dspark:7 or, for "
            "the shape of a checkpoint, dspark:FOLDER:7; may be repeated."
        ),
    ] = None,
    users: Annotated[list[int] | None, typer.Option(help="Users; may be repeated.")] = None,
    context: Annotated[int, typer.Option(help="Prompt tokens a user.")] = 1024,
    acceptance: Annotated[
        float | None, typer.Option(help="Tokens per step to assume (synthetic).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    out: Annotated[Path | None, typer.Option(help="Append the numbers as JSON lines.")] = None,
) -> None:
    """What a model and a drafter of this shape would cost on this machine, with random weights."""
    from slipstream.cost_command import run_cost

    run_cost(
        config,
        drafters=drafter or ["none", "ngram:3"],
        users=users or [1, 16],
        context=context,
        acceptance=acceptance,
        dtype=dtype,
        out=out,
    )


@app.command(epilog="Example: `slipstream train dflash --prompts prompts.jsonl --out my_drafter`")
def train(
    recipe: Annotated[str, typer.Argument(help="mtp, eagle3, dflash, dflash2 or dspark.")],
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint; a stopped run resumes.")],
    target: Annotated[str, typer.Option(help="Model to draft for.")] = "smollm2-135m",
    texts: Annotated[Path | None, typer.Option(help="Folder made by `slipstream texts`.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL; default: the target's own.")] = None,
    count: Annotated[int, typer.Option(help="Prompts the target makes up itself.")] = 256,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 is greedy.")] = 0.0,
    begin: Annotated[Path | None, typer.Option("--from", help="A checkpoint to train on.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1000,
    minutes: Annotated[float | None, typer.Option(help="Train that long instead.")] = None,
    batch: Annotated[int, typer.Option(help="Texts a step and process.")] = 4,
    anchors: Annotated[int, typer.Option(help="Blocks a text and step.")] = 64,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 6e-4,
    draft_len: Annotated[int, typer.Option(help="Draft tokens it is trained for.")] = 7,
    layers: Annotated[int, typer.Option(help="Draft layers (dflash, dflash2, dspark).")] = 1,
    taps: Annotated[int, typer.Option(help="Target layers read (likewise).")] = 3,
    intermediate_size: Annotated[
        int | None, typer.Option("--inner", help="MLP width; default: the target's.")
    ] = None,
    soft: Annotated[
        bool, typer.Option(help="Learn the target's law (mtp, dflash, dflash2).")
    ] = False,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    d_pace: Annotated[bool, typer.Option(help="D-PACE weights (dflash, dflash2).")] = False,
    markov: Annotated[str, typer.Option(help="vanilla, gated or rnn (dspark).")] = "vanilla",
    rank: Annotated[int, typer.Option(help="Of Markov head or selector (dspark, dflash2).")] = 64,
    draft_vocab: Annotated[int | None, typer.Option(help="Draft N frequent tokens.")] = None,
    mix: Annotated[
        str, typer.Option(help="How often kinds of texts count, for example code=2,chat=0.5.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of weights, data and anchors.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if any.")] = None,
) -> None:
    """Train a drafter on the target's own answers."""
    given = locals()
    from slipstream.train.recipes import Shape
    from slipstream.train.trainer import Plan
    from slipstream.train_command import Order, mix_of, run_train

    given["mix"] = mix_of(mix)

    run_train(_picked(Order, given), _picked(Shape, given), _picked(Plan, given), say=typer.echo)


@app.command(epilog="Example: `slipstream export mtp:2 --out mtp_bf16`")
def export(
    drafter: Annotated[str, typer.Argument(help="mtp:2 (as shipped), dflash:PATH:7, ...")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    model: Annotated[str, typer.Option(help="The target it drafts for.")] = "smollm2-135m",
    compact: Annotated[
        bool, typer.Option("--compact", help="8-bit, as ours ship; else bf16, as published.")
    ] = False,
) -> None:
    """Write a drafter's weights in the layout that vLLM and SGLang read."""
    from slipstream.export_command import run_export

    run_export(drafter, out=out, model=model, compact=compact, say=typer.echo)


@app.command(epilog="Example: `slipstream texts --out my_texts --tokens 1000000`")
def texts(
    out: Annotated[Path, typer.Option(help="Folder; a seed is a shard; a stopped run resumes.")],
    target: Annotated[str, typer.Option(help="Model that answers.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(help="Tokens of its own to make.")] = 100_000,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    minutes: Annotated[float | None, typer.Option(help="Stop after that long.")] = None,
    users: Annotated[int, typer.Option(help="Answers at a time.")] = 16,
    seed: Annotated[int, typer.Option(help="Of prompts and answers.")] = 0,
    code: Annotated[float, typer.Option(help="Share of prompts about code and edits.")] = 0.6,
    greedy: Annotated[float, typer.Option(help="Share of greedy answers.")] = 0.7,
    quote: Annotated[
        list[Path] | None,
        typer.Option(help="A folder to quote from, besides Python's; repeatable."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if any.")] = None,
) -> None:
    """Have a target answer prompts of many kinds, for `slipstream train --texts`."""
    from slipstream.texts_command import run_texts
    from slipstream.texts_maker import Wish

    wish = Wish(
        target=target,
        out=out,
        tokens=tokens,
        max_tokens=max_tokens,
        minutes=minutes,
        users=users,
        seed=seed,
        device=device,
        code=code,
        greedy=greedy,
        quote=tuple(quote or ()),
    )
    run_texts(wish, say=typer.echo)


@app.command(epilog="Example: `slipstream doctor`")
def doctor() -> None:
    """Check the machine, then run every drafter and gate on tiny models, in under a minute."""
    from slipstream.doctor import run_doctor

    if not run_doctor(typer.echo):
        raise typer.Exit(1)


def _picked(kind: type[_T], given: dict[str, Any]) -> _T:
    """A dataclass of the options that are named like its fields."""
    return kind(**{f.name: given[f.name] for f in fields(cast("Any", kind)) if f.name in given})


def main() -> None:
    """Entry point."""
    app()
