"""`rlt-dist estimate`: what a configuration costs on a cluster, before anything is started."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlt_dist.util.errors import UserError

if TYPE_CHECKING:
    from rlt_dist.costs.cluster import ClusterConfig
    from rlt_dist.costs.estimate import Estimate
    from rlt_dist.mesh.axes import Axes


def estimate(
    file: Annotated[Path, typer.Argument(metavar="CONFIG", help="A run's configuration.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY.SUB=VALUE...", help="Values that replace the file's."),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster's file [default: none; nothing is refused].")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes [default: as many as the mesh fills].")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="DxPxT", help="Data x pipeline x tensor [default: the configuration's]."
        ),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Number of ids [default: the corpus's].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object.")] = False,
) -> None:
    """Say what a configuration costs: parameters, FLOPs, memory, messages, checkpoints.

    All of it is worked out from sizes: nothing is allocated or run. States are full, and all
    targets are scored. Model FLOPs are forward and backward, which utilisation is measured by;
    executed ones have recomputation too. Memory is that of the fullest rank at its fullest moment,
    messages are those of one step as the rank of each axis that sends most hands them over.

    With a cluster, a run whose ranks do not fit into its devices' memory is refused (exit status
    2), and the smallest changes with which it fits are named.

    Example: `rlt-dist estimate configs/rlt_48x48.yaml --cluster configs/clusters/h100.yaml
    --nodes 8 --vocabulary 32000`
    """
    from rlt_dist.cli.vocabulary import vocabulary_of
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig
    from rlt_dist.costs.cluster import load_cluster
    from rlt_dist.costs.estimate import estimate_run, refusal
    from rlt_dist.costs.run import run_of
    from rlt_dist.mesh.axes import parse_axes

    asked = None if mesh is None else parse_axes(mesh)
    wished = [*(overrides or ()), *(asked.overrides() if asked else ())]
    config = load_typed(file, RunConfig, wished)
    hardware = None if cluster is None else load_cluster(cluster)
    axes = _axes(config, hardware, nodes, asked)
    ids = vocabulary_of(config.data) if vocabulary is None else vocabulary
    on_cpu = hardware is None or hardware.cores is not None
    found = estimate_run(run_of(config, ids, axes, compiled=on_cpu), hardware)
    if as_json:
        from rlt_dist.util.records import to_json

        print(to_json({"file": str(file)} | found.record()))
    else:
        _show(file, found)
    if hardware is not None:
        devices = None if nodes is None else axes.size
        why = refusal(found, hardware.usable, hardware.name, devices)
        if why is not None:
            raise UserError(why)


def _axes(
    config: Any, cluster: "ClusterConfig | None", nodes: int | None, asked: "Axes | None"
) -> "Axes":
    """The mesh: what is asked for, on the nodes if any are given."""
    from rlt_dist.mesh.axes import axes_of, least_axes

    if nodes is None:
        return asked or least_axes(config.mesh)
    if cluster is None:
        raise UserError("--nodes needs --cluster, which says how many devices a node has")
    devices = nodes * cluster.devices_per_node
    if asked is not None:
        return axes_of(config.mesh, devices)
    return axes_of(config.mesh.model_copy(update={"data": None}), devices)


def _show(file: Path, found: "Estimate") -> None:
    from rlt_dist.cli.console import console

    screen = console()
    run = found.run
    typer.echo(
        f"{file}, vocabulary {run.vocabulary:,}, on {run.axes} (data x pipeline x tensor), "
        f"{run.micro_batches} micro-batches of {run.own.lanes} lanes, {run.own.tokens} tokens each"
    )
    for title, columns, rows in _tables(found):
        screen.print(_table(title, columns, rows))
    if found.cluster is not None:
        need, have = found.memory.peak, found.cluster.usable
        verdict = "fits" if need <= have else "does not fit"
        typer.echo(f"{verdict}: {_gib(need)} GiB of {_gib(have)} that {found.cluster.name} gives")


_Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _tables(found: "Estimate") -> list[_Table]:
    flops, executed = found.model_flops, found.executed_flops
    purposes = [*executed, "all"]
    columns = {
        "model": [*(flops.get(purpose, 0.0) for purpose in executed), sum(flops.values())],
        "executed": [*executed.values(), sum(executed.values())],
    }
    products: list[tuple[str, ...]] = [
        (str(purpose), *(f"{column[at]:,.0f}" for column in columns.values()))
        for at, purpose in enumerate(purposes)
    ]
    whole: list[tuple[str, ...]] = [("parameters", f"{found.parameters:,}")]
    whole += [("checkpoint, GiB", _gib(found.checkpoint)), ("lanes", f"{found.lanes:,}")]
    memory: list[tuple[str, ...]] = [
        (part, _gib(size)) for part, size in found.memory.parts.items()
    ]
    memory.append(("all", _gib(found.memory.peak)))
    sent: list[tuple[str, ...]] = [
        (axis, kind, f"{calls:,}", f"{handed:,}", f"{wire:,}")
        for (axis, kind), (calls, handed, wire) in found.traffic.items()
    ]
    fullest = f"memory of stage {found.stage}, {found.memory.fullest}"
    return [
        ("of the whole run", ("what", "number"), whole),
        ("FLOPs of a token", ("for", *columns), products),
        (fullest, ("part", "GiB"), memory),
        ("messages of a step", ("axis", "kind", "calls", "bytes", "bytes on the wire"), sent),
    ]


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    text = sum(not any(c.isdigit() for c in cell) for cell in rows[0]) if rows else 0
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < text else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _gib(size: float) -> str:
    return f"{size / 2**30:,.3f}"
