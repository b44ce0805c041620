"""Section of a run's config that names its text, and how it becomes batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, StringConstraints, field_validator, model_validator

from shoal.base.section import Section


class SourceConfig(Section):
    """Source of documents."""

    source: Literal["auto", "stdlib", "text", "jsonl", "parquet", "megatron", "hub", "synthetic"] = "auto"
    """auto: the files in paths, each by its name; without paths, the dataset; without either, stdlib. stdlib: the text
    of Python's own standard library. text, jsonl, parquet: files in paths, whatever their names. megatron: .bin and
    .idx files of token ids, and nanoGPT's .bin files. hub: a Hugging Face dataset. synthetic: random tokens with uneven
    masks (for verification).
    """

    paths: tuple[str, ...] = ()
    """Files, folders, globs or fsspec URLs (auto, text, jsonl, parquet, megatron)."""

    field: str = "text"
    """The field that holds the text, or a list of token ids (jsonl, parquet, hub)."""

    chat: bool = False
    """Documents are conversations: field (default: messages) holds a list of {role, content}, the tokenizer's chat
    template makes text of them, and only the assistant's tokens count in the loss."""

    dataset: str = ""
    """The dataset's name on the hub (hub)."""

    dataset_split: str = "train"
    """The dataset's split (hub, and folders made by save_to_disk)."""

    unreadable: Literal["stop", "skip"] = "stop"
    """What to do with a document that cannot be read: stop with an error that names it, or skip and count it."""

    @field_validator("paths", mode="before")
    @classmethod
    def _from_one(cls, value: Any) -> Any:
        """Accept one path, and a list, which this validator gets as Python's own."""
        return (value,) if isinstance(value, str) else _as_tuple(value)

    @property
    def read_field(self) -> str:
        """The field that holds a document."""
        return "messages" if self.chat and self.field == "text" else self.field

    @property
    def reads(self) -> str:
        """The chosen source, with "files" and the others that auto may mean."""
        if self.source != "auto":
            return self.source
        if self.paths and all(path.endswith((".bin", ".idx")) for path in self.paths):
            return "megatron"
        return "files" if self.paths else "hub" if self.dataset else "stdlib"


WEIGHTED = re.compile(r"(.+):([0-9]+\.?[0-9]*|\.[0-9]+)")
"""Path of a source with its weight."""


class MixtureSource(SourceConfig):
    """One source of a mixture."""

    weight: NonNegativeFloat = 1.0
    """Number of samples relative to the other sources; 0 only with a schedule."""

    epochs: NonNegativeFloat = 0.0
    """Passes over the source after which the others take its place; 0 for no limit."""

    schedule: tuple[tuple[PositiveFloat, NonNegativeFloat], ...] = ()
    """Later weights: pairs of a number of tokens that the run has read of all sources, and the weight from then on."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        """Accept a path alone or with its weight, and lists, which this validator gets as Python's own."""
        if isinstance(value, str):
            weighted = None if Path(value).exists() else WEIGHTED.fullmatch(value)
            value = {"paths": [weighted[1]], "weight": float(weighted[2])} if weighted else {"paths": [value]}
        return {name: _as_tuple(each) for name, each in value.items()} if isinstance(value, dict) else value

    def constant(self) -> MixtureSource:
        """Return the source with its largest weight throughout, without limit."""
        weight = max(self.weight, *(weight for _, weight in self.schedule), 0.0)
        return self.model_copy(update={"weight": weight, "epochs": 0.0, "schedule": ()})


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


SourceName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,40}$")]


class DataConfig(SourceConfig):
    """Source of the text, and how it is turned into batches."""

    mixture: dict[SourceName, MixtureSource] = Field(default={})
    """Sources by name, in place of one: tables of a TOML file with the fields of a source, weight and epochs; or only
    NAME PATH or NAME PATH:WEIGHT for each."""

    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json (see `shoal data train-tokenizer`)."""

    sequence_length: int = Field(default=256, gt=0, le=2**30)
    """s, tokens per sequence."""

    document_mask: bool = False
    """Keep attention and loss inside each document of a packed sequence."""

    validation_fraction: float = Field(default=0.02, gt=0, lt=0.5)
    """Fraction of the documents held out for validation."""

    validation: dict[SourceName, str] = Field(default={})
    """More texts for validation, NAME = PATH of files as in paths: their losses are logged as validation/NAME."""

    sampler: Literal["even", "overlap", "pool"] = "even"
    """Samples assigned to a replica. even: its share of every global batch. overlap: its own part of each epoch, which
    extends into its neighbour's. pool: the next samples of a common queue. All but even need a relaxed parallel.sync.
    """

    overlap: NonNegativeFloat = 0.25
    """overlap: how far a part extends into the next, as a fraction of its length."""

    cache: Path = Path("~/.cache/shoal")
    """Folder of the tokenised shards, keyed by content."""

    @property
    def reads(self) -> str:
        """The chosen source, with "files" and the others that auto may mean, and "mixture"."""
        return "mixture" if self.mixture else super().reads

    def sources(self) -> dict[str, DataConfig]:
        """Return the config of each source of the mixture by name, or this config by ""."""
        names = SourceConfig.model_fields
        return {
            name: self.model_copy(update={"mixture": {}} | {field: getattr(source, field) for field in names})
            for name, source in self.mixture.items()
        } or {"": self}

    def select_files(self, paths: tuple[str, ...]) -> DataConfig:
        """Return the config whose validation split holds all documents of some files."""
        changes = {"source": "auto", "paths": paths, "dataset": "", "sampler": "even", "validation_fraction": 1.0}
        return self.model_copy(update={**changes, "mixture": {}, "validation": {}})
