"""``drivetrain merge-weights``: model files of the weights in a checkpoint, whatever wrote it."""

from __future__ import annotations

import click

from drivetrain.cli.options import option

__all__ = ["merge_weights"]


@click.command("merge-weights")
@click.argument("checkpoint_dir")
@click.argument("output")
@option("--max_shard_size", metavar="SIZE", default="10GB", show_default=True, help="Most that one file holds.")
@option("--unsafe_serialization", is_flag=True, help="Write pytorch_model.bin, a pickle, instead of safetensors.")
@option("--overwrite", is_flag=True, help="Replace the model files that are in OUTPUT already.")
def merge_weights(
    checkpoint_dir: str, output: str, max_shard_size: str, unsafe_serialization: bool, overwrite: bool
) -> None:
    """Write the weights in CHECKPOINT_DIR, which save_state wrote, into the directory OUTPUT.

    Whole weights and the pieces of any number of processes become model.safetensors, or several files with an index, as
    save_model writes them. No process is started, and the backend that saved them need not be installed. With several
    models in the checkpoint, each gets a directory in OUTPUT, named by its number. Checksums are compared. Model files
    that are in OUTPUT already are an error, unless told to --overwrite them; other files there are left alone.
    """
    from drivetrain.checkpoint import merging
    from drivetrain.checkpoint.model_files import parse_size
    from drivetrain.config.files import expanded

    try:
        limit = parse_size(max_shard_size)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--max_shard_size'") from None
    source, target = expanded(checkpoint_dir), expanded(output)
    merged = merging.merge_weights(
        source, target, max_shard_size=limit, safe=not unsafe_serialization, overwrite=overwrite
    )
    for model in merged:
        label = f"model {model.index} ({model.kind})"
        if not model.files:
            click.echo(f"{label}: left out, since a save_state pre-hook of the script saved it", err=True)
        elif len(model.files) == 1:
            click.echo(f"{label}: wrote {model.files[0]}")
        else:
            click.echo(f"{label}: wrote {len(model.files) - 1} files, listed in {model.files[-1]}")
        if model.left_out:
            click.echo(f"{label}: left out, since it is no tensor: {', '.join(model.left_out)}", err=True)
