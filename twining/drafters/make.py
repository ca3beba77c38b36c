"""Choose and build the drafter that a configuration asks for.

Two steps, because the target must know its tap layers before it is loaded:

    taps = tap_layers(config)                                    # () unless a DFlash2 drafter is
    used model = Glm5Next.load(ckpt, model_config, tap_layers=taps) drafter = make_drafter(config,
    model, max_seqs=8, max_chunk=2048)
"""

from pathlib import Path

from twining.checkpoint.dflash2_config import DFlash2Config, parse_dflash2
from twining.checkpoint.hf_config import load_config
from twining.checkpoint.reader import Checkpoint
from twining.config import DraftConfig, DrafterName
from twining.drafters.base import Drafter
from twining.drafters.dflash2.drafter import DFlash2Drafter, check_ring_fits
from twining.drafters.dflash2.load import load_dflash2
from twining.drafters.mtp import MtpDrafter
from twining.drafters.ngram import NgramDrafter
from twining.drafters.none import NoDrafter
from twining.errors import ConfigError
from twining.models.glm5_next.model import Glm5Next


def resolve_name(config: DraftConfig, *, has_mtp: bool) -> DrafterName:
    """The drafter in effect: `auto` takes dflash2 if a drafter folder is given, else mtp if the
    checkpoint has the block, else ngram; no drafts means none.

    Raises ConfigError when the drafter asked for is not available.
    """
    if config.num_draft_tokens == 0:
        return "none"
    if config.drafter == "auto":
        if config.drafter_dir is not None:
            return "dflash2"
        return "mtp" if has_mtp else "ngram"
    if config.drafter == "dflash2" and config.drafter_dir is None:
        raise ConfigError(
            "drafter=dflash2 needs drafter_dir, the folder of a DFlash2 checkpoint;"
            " or use drafter=auto"
        )
    if config.drafter == "mtp" and not has_mtp:
        raise ConfigError(
            "drafter=mtp, but the checkpoint has no MTP block; use drafter=ngram or drafter=auto"
        )
    return config.drafter


def _uses_dflash2(config: DraftConfig) -> Path | None:
    wanted = config.num_draft_tokens > 0 and config.drafter in ("auto", "dflash2")
    return config.drafter_dir if wanted else None


def tap_layers(config: DraftConfig) -> tuple[int, ...]:
    """Target layers whose states the drafter reads, in its order; () if it reads none.

    Reads only the drafter's config.json. Raises CheckpointError, or ConfigError for a drafter that
    this engine cannot run.
    """
    folder = _uses_dflash2(config)
    if folder is None:
        return ()
    drafter_config = parse_dflash2(load_config(folder))
    check_ring_fits(drafter_config)
    return drafter_config.target_layer_ids


def make_drafter(config: DraftConfig, model: Glm5Next, *, max_seqs: int, max_chunk: int) -> Drafter:
    """Build the drafter; max_chunk is the longest prefill chunk in tokens.

    Raises ConfigError when it is not available or does not belong to this target, CheckpointError
    when its files are damaged.
    """
    name = resolve_name(config, has_mtp=model.mtp is not None)
    if name == "ngram":
        return NgramDrafter(ngram_min=config.ngram_min, max_draft=config.num_draft_tokens)
    if name == "mtp" and model.mtp is not None:
        return MtpDrafter(model.mtp, model, max_draft=config.num_draft_tokens)
    if name == "dflash2" and config.drafter_dir is not None:
        ckpt = Checkpoint.open(config.drafter_dir)
        drafter_config = parse_dflash2(ckpt.config)
        check_belongs(drafter_config, model, config.drafter_dir)
        weights = load_dflash2(ckpt, drafter_config)
        return DFlash2Drafter(
            drafter_config, weights, model, max_seqs=max_seqs, max_chunk=max_chunk
        )
    return NoDrafter()


def check_belongs(config: DFlash2Config, model: Glm5Next, folder: Path) -> None:
    """Raises ConfigError unless sizes, vocabulary and taps fit the target."""
    target = model.config
    pairs = (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_layer_ids", config.target_layer_ids, model.tap_layers),
        ("num_target_layers", config.num_target_layers or target.num_layers, target.num_layers),
    )
    for key, mine, wanted in pairs:
        if mine != wanted:
            raise ConfigError(
                f"drafter {folder}: {key} is {mine}, the target has {wanted};"
                " it was trained for another model, choose another drafter_dir"
            )
