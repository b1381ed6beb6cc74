"""The command line. Nothing here imports torch until a command needs it, so that help is instant.

Annotations are objects here, not strings: typer would have to compile each of them again at every start.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import portable

app = typer.Typer(
    help="One device API for PyTorch on NVIDIA/AMD GPUs, AWS Trainium, Huawei Ascend and CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich's would cost more than the rest of start-up
    add_help_option=False,  # _main has it
)


def _version(asked: bool) -> None:
    if asked:
        print(f"portable {portable.__version__}")
        raise typer.Exit


def _help(context: typer.Context, asked: bool) -> None:
    if asked:
        print(context.get_help())
        raise typer.Exit


@app.callback()
def _main(
    # typer's own --help of a group has no default; when it is not given, typer >= 0.29 imports pydantic to convert the missing
    # value, which doubles the time of every command. One with the default False needs no conversion.
    show_help: Annotated[
        bool, typer.Option("--help", callback=_help, is_eager=True, help="Show this message and exit.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


@contextlib.contextmanager
def _standard_output_to_error() -> Iterator[None]:
    """Send what is printed inside the block to standard error, by C libraries too (they write to the file descriptor)."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    backend: Annotated[str | None, typer.Option(help="Choose this backend first (default: the best).")] = None,
) -> None:
    """Show backends, devices, dtypes, precision policy and compile backend, and why a backend is not available."""
    from portable._loading import ensure_torch

    ensure_torch()
    from portable import selection
    from portable.info import collect

    with _standard_output_to_error():  # what plugins and vendors' libraries print is no part of the answer
        if backend:
            selection.use(backend)
        found = collect()
    if as_json:
        import json

        print(json.dumps(found.as_dict(), indent=2))
    else:
        from rich.console import Console

        from portable.info_view import show

        show(found, Console())
    if found.problem:
        raise typer.Exit(1)


explain_app = typer.Typer(
    no_args_is_help=True, help="Say what would be chosen on a device, and why; the device need not be here."
)
app.add_typer(explain_app, name="explain")


@explain_app.command("attention")
def explain_attention(
    shape: Annotated[str, typer.Option(help="Query: batch,heads,length,head_dim.")] = "1,8,2048,64",
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, fp64.")] = "bf16",
    mask: Annotated[
        str,
        typer.Option(help="none, causal, bottom-right, window:LEFT,RIGHT, prefix:N, padding, boolean, additive, alibi."),
    ] = "none",
    dropout: Annotated[float, typer.Option(help="Rate.", min=0, max=1)] = 0.0,
    backend: Annotated[str | None, typer.Option(help="cpu, cuda, ascend, neuron (default: the one in use).")] = None,
    generation: Annotated[str | None, typer.Option(help="sm_80 or 8.0, Ascend910B2, trn2, ...")] = None,
    key_heads: Annotated[int | None, typer.Option(help="Fewer than query heads: grouped-query attention.")] = None,
    keys: Annotated[int | None, typer.Option(help="Length of key and value.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="head_dim of value.")] = None,
    train: Annotated[bool, typer.Option("--train", help="A backward pass follows.")] = False,
    dims: Annotated[int, typer.Option(help="Dimensions of the inputs.", min=3, max=4)] = 4,
    strided: Annotated[bool, typer.Option("--strided", help="The last dimension is not contiguous.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which attention path serves a call, and why the others do not."""
    from portable.errors import PortableError

    try:
        from portable._loading import ensure_torch

        ensure_torch()
        from portable import selection
        from portable.attn.explain import by_words

        found = by_words(
            selection.find(backend) if backend else selection.active(), shape, dtype, mask, dropout, generation,
            key_heads=key_heads, keys=keys, value_dim=value_dim, grad=train, dims=dims, dense_last=not strided,
        )  # fmt: skip
    except PortableError as error:
        print(f"portable explain attention: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        import json

        print(json.dumps(found.as_dict(), indent=2))
        return
    from rich.console import Console

    Console().print(found.table())


@explain_app.command("precision")
def explain_precision(
    backend: Annotated[str | None, typer.Option(help="cpu, cuda, ascend, neuron (default: the one in use).")] = None,
    generation: Annotated[str | None, typer.Option(help="sm_80 or 8.0, Ascend910B2, trn2, ...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which dtypes to compute in, whether to scale the loss, and what each precision switch says now."""
    from portable.errors import PortableError

    try:
        from portable._loading import ensure_torch

        ensure_torch()
        from portable.numerics import precision

        with _standard_output_to_error():
            found = precision(backend=backend, generation=generation)
    except PortableError as error:
        print(f"portable explain precision: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        import json

        print(json.dumps(found.as_dict(), indent=2))
        return
    from rich.console import Console

    Console().print(found.table())


class _Run(TyperCommand):
    """As in python itself, what follows ``-m MODULE`` belongs to the module, options too."""

    with_value = frozenset({"--backend", "--report"})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        before = args[: args.index("--")] if "--" in args else args
        position = before.index("-m") if "-m" in before else len(args)
        # An earlier word that is no option, nor the value of one, is the script, and then the -m is the script's own.
        if position + 1 < len(args) and self._is_ours(before[:position]):
            args = [*args[: position + 2], "--", *args[position + 2 :]]
        return super().parse_args(ctx, args)

    def _is_ours(self, words: list[str]) -> bool:
        return all(word.startswith("-") or words[i - 1] in self.with_value for i, word in enumerate(words))


class _Rehearse(_Run):
    with_value = frozenset(
        {"--backend", "--generation", "--memory", "--devices", "--steps", "--json", "--markdown", "--fail-on"}
    )


@app.command(
    cls=_Run,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run(
    script: Annotated[str | None, typer.Argument(help="The script, followed by its own arguments.")] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    module: Annotated[str | None, typer.Option("-m", help="Run a module instead of a script, like python -m.")] = None,
    backend: Annotated[str, typer.Option(help="auto, cpu, cuda, ascend, neuron, or another plugin's backend.")] = "auto",
    report: Annotated[Path | None, typer.Option(help="Write what was redirected as JSON to this file.")] = None,
    quiet: Annotated[bool, typer.Option(help="Do not print the closing report.")] = False,
) -> None:
    """Run a script written for CUDA on another backend, without editing it."""
    if module is None and script is None:
        raise typer.BadParameter("nothing to run was given; name a script, or a module with -m")
    rest = list(args or [])
    if module is not None and script is not None:
        rest.insert(0, script)  # after -m the first positional word already belongs to the module
    from portable._loading import ensure_torch

    ensure_torch()
    from portable.runner import run_script

    chosen = None if backend == "auto" else backend
    target = module if module is not None else script
    assert target is not None
    sys.exit(run_script(target, rest, module=module is not None, backend=chosen, report=report, quiet=quiet))


@app.command(
    cls=_Rehearse,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def rehearse(
    backend: Annotated[str, typer.Option(help="ascend, neuron, or another plugin's backend that can be emulated.")],
    script: Annotated[str | None, typer.Argument(help="The script, followed by its own arguments.")] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    module: Annotated[str | None, typer.Option("-m", help="Run a module instead of a script, like python -m.")] = None,
    generation: Annotated[str | None, typer.Option(help="trn2, Ascend910B2, ... (default: the backend's).")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each device, such as 24GiB (default: the chip's).")] = None,
    devices: Annotated[int | None, typer.Option(help="How many devices the program sees.")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop the script after this many optimizer steps.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the result as JSON to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a Markdown section to this file.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first refusal, as the device would.")] = False,
    fail_on: Annotated[
        str | None, typer.Option(help="blocker, wrong or major: exit with 3 if there is such a finding.")
    ] = None,
) -> None:
    """Run a script on an emulated device, and report what the real one would refuse, get wrong or be slow at."""
    if module is None and script is None:
        raise typer.BadParameter("nothing to rehearse was given; name a script, or a module with -m")
    rest = list(args or [])
    if module is not None and script is not None:
        rest.insert(0, script)
    from portable.errors import PortableError

    try:
        from portable.rehearse import options

        target = module if module is not None else script
        assert target is not None
        asked = options.Options(
            backend, target, tuple(rest), module is not None, generation,
            None if memory is None else options.memory(memory), devices, steps, as_json, markdown, strict, fail_on,  # type: ignore[arg-type]
        )  # fmt: skip
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # an installed vendor package would take the one slot for devices
        from portable._loading import ensure_torch

        ensure_torch()
        from portable.rehearse.command import rehearse as start

        code = start(asked)
    except PortableError as error:
        print(f"portable rehearse: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    sys.exit(code)
