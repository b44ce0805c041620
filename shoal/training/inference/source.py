"""Trained models to use: the newest good checkpoint of a run, or a folder in Hugging Face's format."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.base.addresses import to_path
from shoal.base.errors import UsageError, redact
from shoal.base.files import read_json
from shoal.base.section import validate
from shoal.base.terminal import warn
from shoal.engine.checkpoint import CheckpointError, load, newest_good
from shoal.engine.checkpoint.hugging_face import HFWeights, read_hf_config
from shoal.engine.checkpoint.manifest import Committed
from shoal.engine.collectives.json_collectives import world
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.tokenizer import Tokenizer, load_tokenizer
from shoal.engine.device import choose_transport, pick_device
from shoal.engine.models.experts.router import Router, find_modules
from shoal.pipeline.from_layout import check_run
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RUN_FILE, DataConfig, RunConfig, build_config, load_config, suggest_run
from shoal.spec.config.sections import TrainConfig
from shoal.spec.layout import Layout
from shoal.training.run_folder import get_checkpoint_folder, with_own_tokenizer
from shoal.training.step.model_state import ModelState

HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HF_SEQUENCE = 1024  # tokens per sequence of a run that starts with a model folder, unless its model is shorter
_NOT_WEIGHTS = ("optimizer.", "precision.", "relaxed.", "replica.")


@dataclass(frozen=True)
class ModelSource:
    """A trained model, described and not yet read.

    Attributes:
        weights: path of a checkpoint, or of a folder in Hugging Face's format.
    """

    config: RunConfig
    shape: ModelShape
    weights: str
    ends: frozenset[int]

    @property
    def is_run(self) -> bool:
        """Whether the model was trained by a run, not imported."""
        return self.config.model.weights is None or str(self.config.model.weights) != self.weights

    @property
    def window(self) -> int:
        """Maximum context length in generation: that of a run's training, or of an imported model."""
        return self.config.data.sequence_length if self.is_run else self.shape.max_sequence

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.config.data.tokenizer)

    def on(self, layout: Layout, **changes: Mapping[str, Any]) -> RunConfig:
        """Return the config of passes on a layout.

        Args:
            changes: fields of the sections `data` and `train`.

        Raises:
            UsageError: the model does not fit the layout.
        """
        own, batch = self.config.train, layout.dp * layout.micro_batch * layout.pp
        train = {"global_batch": batch, "precision": own.precision, "attention": own.attention, "seed": own.seed}
        config = RunConfig(
            model=self.config.model, parallel=layout,
            train=validate(TrainConfig, train | dict(changes.get("train", {})), source="train"),
            data=self.config.data.model_copy(update={"sampler": "even", "overlap": OVERLAP, **changes.get("data", {})}),
        )
        if "fp8" in config.train.precision:
            config = config.model_copy(update={"float8": self.config.float8})
        check_run(config, self.shape)
        return config


OVERLAP = DataConfig.model_fields["overlap"].default  # which the sampler "even" does not read


def open_source(folder: str | Path) -> ModelSource:
    """Describe the model of a run folder, of a folder in Hugging Face's format, or of the hub ("owner/name").

    Damaged checkpoints that are newer than the one taken are listed on stderr.

    Raises:
        UsageError: it is neither, has no good checkpoint, or holds a model that shoal does not compute.
    """
    name, folder = Path(folder).expanduser().absolute().name, find_hf_folder(folder)
    if (folder / RUN_FILE).is_file() or not (folder / "config.json").is_file():
        config, shape, tokenizer = describe_run(folder)
        found = find_good_checkpoint(config, folder)
        ends = frozenset({tokenizer.end_of_document})
        return ModelSource(config, shape, str(found.path), ends)
    config = build_config(describe_hf(folder.absolute(), name))
    tokenizer = load_tokenizer(config.data.tokenizer)
    shape = config.model.shape(vocab=tokenizer.vocab_size, sequence_length=1)
    HFWeights(folder, shape)  # its files are readable
    ends = frozenset({tokenizer.end_of_document, *_hf_ends(folder)})
    return ModelSource(config, shape, str(config.model.weights), ends)


def describe_run(folder: str | Path) -> tuple[RunConfig, ModelShape, Tokenizer]:
    """Return the config of a run, its model and its tokenizer; raise `UsageError` without a run in the folder."""
    if not (file := Path(folder, RUN_FILE)).is_file():
        model = "" if Path(folder, "config.json").is_file() else (
            ", nor of a model in Hugging Face's format (config.json is missing)")
        raise UsageError(f"{folder} is not the folder of a run ({RUN_FILE} is missing){model}.{suggest_run(folder)}")
    config = with_own_tokenizer(load_config(file), Path(folder))
    if config.model.module:
        raise UsageError("this needs a model of text, and the run's is its own (model.module)."
                         "\n  Load its weights: shoal.load_checkpoint.")
    tokenizer = load_tokenizer(config.data.tokenizer)
    shape = config.model.shape(vocab=tokenizer.vocab_size, sequence_length=config.data.sequence_length)
    return config, shape, tokenizer


def find_hf_folder(name: str | Path) -> Path:
    """Return a model folder; for "owner/name" of a model on the Hugging Face hub, its local copy, downloaded if needed.

    Of a model on the hub only configs, safetensors, tokenizers and templates are taken, no code and no pickle.

    Raises:
        UsageError: there is no such folder, nor a model that can be downloaded.
    """
    folder = Path(name).expanduser()
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name)) or folder.exists() or folder.absolute().parent.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    print(f"downloading {name} from the hub, unless it is here", file=sys.stderr)
    try:
        return Path(snapshot_download(str(name), allow_patterns=HUB_FILES, ignore_patterns=["*/*", "consolidated*"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UsageError(
            f"{name} is no folder, and cannot be taken from the hub: {redact(str(error))}"
            "\n  Name the folder of a run, or of a model with config.json; HF_TOKEN opens models that need consent."
        ) from None


def describe_hf(folder: Path, name: str, sequence_length: int | None = None) -> dict[str, Any]:
    """Return the values of the config of a run that starts with a model folder.

    Args:
        folder: an absolute path.
        name: name of the model.
        sequence_length: tokens per sequence (default: `HF_SEQUENCE`, or the model's longest sequence if shorter).
    """
    fields = read_hf_config(folder)
    data: dict[str, Any] = {"sequence_length": sequence_length or min(HF_SEQUENCE, fields["max_sequence"])}
    if (folder / "tokenizer.json").is_file():
        data["tokenizer"] = str(folder / "tokenizer.json")
    return {"model": {"name": name, "weights": str(folder), **fields}, "data": data}


def _hf_ends(folder: Path) -> set[int]:
    """Return the ids that end a text by ``generation_config.json``, which a chat model has besides its tokenizer's."""
    file = folder / "generation_config.json"
    values = read_json(file) if file.is_file() else {}
    ends = values.get("eos_token_id") if isinstance(values, dict) else None
    return {i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int)}


def find_good_checkpoint(config: RunConfig, run_folder: str | Path) -> Committed:
    """Return the newest good checkpoint of a run, and print the damaged ones that are newer.

    Raises:
        CheckpointError: there is none.
    """
    found, refused = newest_good(get_checkpoint_folder(config, Path(run_folder)))
    for error in refused:
        warn(f"checkpoint refused: {error}")
    if found is None:
        raise CheckpointError(f"{run_folder} has no good checkpoint.")
    return found


def load_model(source: ModelSource, config: RunConfig) -> ModelState:
    """Build the model on this rank of the config's layout, and read this rank's part of its weights. Collective."""
    layout, ranks = config.parallel, config.parallel.world_size
    rank = dist.get_rank() if ranks > 1 else 0
    device = pick_device(config.train.device, rank, shared=True)
    state = ModelState(config, source.shape, Mesh(layout, rank, device, choose_transport(device, ranks)))
    if not source.is_run:
        state.read_weights(Path(source.weights))
        return state
    pieces = {f"model.{name}": held for name, held in state.weights().items()}
    load(
        to_path(source.weights), pieces, group=world() if ranks > 1 else None, convert=True,
        model=source.shape.model_dump(mode="json"), ignore_prefixes=_NOT_WEIGHTS,
    )
    state.parameters.gather()
    return state


def read_any_length(state: ModelState) -> None:
    """Let experts take all of their tokens: their capacity is a fraction of a full sequence, not of a part of one."""
    for stage in state.stages:
        for router in find_modules(stage.module, Router):
            router.experts = router.experts.model_copy(update={"capacity_factor": 0.0})


def check_generates(source: ModelSource, what: str | Path) -> None:
    """Reject a model that cannot compute one token after another."""
    if source.shape.experts is not None and source.shape.experts.gate == "expert-choice":
        raise UsageError(f"{what}: its experts choose among all tokens of a sequence, also later ones, so it "
                         "cannot generate one token after another.")
