"""The run's config: read back as written, refused in the words of the file."""

import types
from pathlib import Path
from typing import Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, PositiveInt

from shoal.base.errors import UsageError
from shoal.base.section import NonEmpty, Section, docstrings, plain, validate
from shoal.cli.main import main
from shoal.spec.catalog import model_shape
from shoal.spec.config import DataConfig, RunConfig, build_config, load_config, save_config
from shoal.spec.config.model import ModelConfig
from shoal.spec.config.run import RENAMED_KEYS, print_rename, rename_option
from shoal.spec.layout import Layout, ScheduleName

WORDS = st.text("abcxyz ./~*-_'\"\\\n0é", max_size=8)


def values_of(annotation, metadata=()):
    """A strategy for every value that a field admits."""
    origin, args = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):  # Annotated[T, bounds]
        return values_of(annotation.__origin__, (*metadata, *annotation.__metadata__))
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of([st.none() if a is type(None) else values_of(a, metadata) for a in args])
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(values_of(args[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, args))
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields.items()
        return st.fixed_dictionaries({key: values_of(f.annotation, tuple(f.metadata)) for key, f in fields})
    if annotation is bool:
        return st.booleans()
    if annotation in (int, float):
        return numbers(annotation, metadata)
    patterns = [m.pattern for m in metadata if getattr(m, "pattern", None)]
    return st.from_regex(patterns[0], fullmatch=True) if patterns else {str: WORDS, Path: WORDS.map(Path)}[annotation]


def numbers(kind, metadata):
    bounds = [b for m in metadata for b in (m.metadata if hasattr(m, "metadata") else [m])]
    low = max([b.gt if isinstance(b, Gt) else b.ge for b in bounds if isinstance(b, Gt | Ge)], default=-1000)
    high = min([b.lt if isinstance(b, Lt) else b.le for b in bounds if isinstance(b, Lt | Le)], default=10**9)
    open_low, open_high = any(isinstance(b, Gt) for b in bounds), any(isinstance(b, Lt) for b in bounds)
    if kind is int:
        return st.integers(low + open_low, high - open_high)
    return st.floats(low, high, exclude_min=open_low, exclude_max=open_high)


SCHEDULES = st.sampled_from(get_args(ScheduleName)) | WORDS.map(lambda word: f"file:{word}.csv")


@st.composite
def configs(draw) -> RunConfig:
    return RunConfig(
        **{
            name: {
                key: draw(SCHEDULES if key == "schedule" and name == "parallel"
                          else values_of(field.annotation, tuple(field.metadata)))
                for key, field in section.annotation.model_fields.items()
            }
            for name, section in RunConfig.model_fields.items()
        }
    )


@given(config=configs())
def test_any_config_reads_back_as_written(tmp_path_factory, config):
    file = tmp_path_factory.getbasetemp() / "any-config.toml"
    save_config(config, file)
    assert load_config(file) == config
    assert build_config(plain(config)) == config


def test_fields_given_in_python_replace_the_files(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[train]\nsteps = 9\nseed = 3\nglobal_batch = 4\n[parallel]\ndp = 2\n')
    config = load_config(file, train={"steps": 5}, data={"sequence_length": 64})
    assert config == build_config({"train": {"steps": 5, "seed": 3, "global_batch": 4}, "parallel": {"dp": 2},
                                   "data": {"sequence_length": 64}})  # fmt: skip
    with pytest.raises(UsageError, match=r"stepz.*did you mean 'steps'"):
        load_config(file, train={"stepz": 5})
    with pytest.raises(UsageError, match=r"trian.*did you mean 'train'"):
        load_config(file, trian={"steps": 5})
    assert load_config(file, parallel=Layout(tp=2)) == load_config(file).replace(parallel=Layout(tp=2))
    with pytest.raises(UsageError, match=r"load_config: there is no section 'paralel'.*did you mean 'parallel'"):
        load_config(file, paralel=Layout(tp=2))
    with pytest.raises(UsageError, match=r"train = Layout\(tp=2\): it is a section\.\n  Give a TrainConfig"):
        load_config(file, train=Layout(tp=2))


def test_a_config_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "folder").mkdir()
    for file, says in ((tmp_path / "folder", "it is a folder"), (tmp_path / "none" / "a.toml", "there is no folder"),
                       (tmp_path / f"{'a' * 300}.toml", "File name too long"), (tmp_path / "a\0b", "null byte")):
        with pytest.raises(UsageError, match=says):
            save_config(RunConfig(), file)
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        load_config(tmp_path / f"{'a' * 300}.toml")
    save_config(RunConfig(), tmp_path / "a.toml", new=True)
    with pytest.raises(UsageError, match="the file exists, and is not overwritten"):
        save_config(RunConfig(), tmp_path / "a.toml", new=True)



def test_every_field_says_what_it_means():
    for name, section in RunConfig.model_fields.items():
        for key in section.annotation.model_fields:
            assert docstrings(section.annotation).get(key), f"{name}.{key} has no docstring"


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().train.steps = 3


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[parallel]\nzreo = 1", "there is no key 'parallel.zreo'; did you mean 'zero'?"),
        ("[paralel]\nzero = 1", "there is no key 'paralel'; did you mean 'parallel'?"),
        ("[train]\ntp = 2", "there is no key 'train.tp'; did you mean 'parallel.tp'?"),
        ("steps = 2", "there is no key 'steps'; did you mean 'train.steps'?"),
        ("[optimizer]\nlr = 2", "there is no key 'optimizer.lr'; did you mean 'optimizer.learning_rate'?"),
        ("[model]\nnum_attention_heads = 2", "key 'model.num_attention_heads'; did you mean 'model.heads'?"),
        ("[model.experts]\nnum_experts = 2", "key 'model.experts.num_experts'; did you mean 'count'?"),
        ("[optimizer]\nlr_decay_style = 2", "key 'optimizer.lr_decay_style'; did you mean 'optimizer.schedule'?"),
        ("[train]\noutput_dir = 2", "key 'train.output_dir'; it is an option of the command line: --run-folder"),
        ("[train]\nepochs = 2", "there is no key 'train.epochs'; allowed: "),  # which are not steps
        ("[checkpoint]\nxyz = 2", "there is no key 'checkpoint.xyz'; allowed: asynchronous, every, folder, keep"),
        ("[parallel]\ntp = 0", "parallel.tp = 0: input should be greater than 0"),
        ("[parallel]\nzero = 4", "parallel.zero = 4: input should be 0, 1, 2 or 3"),
        ("[parallel]\nschedule = 'zb-h'", "'zb-h': there is no such schedule; did you mean 'zb-h1' or 'zb-h2'?"),
        ("[optimizer]\nname = 'AdamW'", "optimizer.name = 'AdamW': there is no such value; did you mean 'adamw'?"),
        ("[train]\nsteps = 'many'", "train.steps = 'many': input should be a valid integer"),
        ("[train]\nsteps = 1.5", "train.steps = 1.5: input should be a valid integer"),
        ("[optimizer]\nlearning_rate = nan", "optimizer.learning_rate = nan: input should be a finite number"),
        ("[optimizer]\nbetas = [0.9, 1.0]", "optimizer.betas = 1.0: input should be less than 1"),
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas = "),
        ("[data]\nvalidation_fraction = 0.5", "data.validation_fraction = 0.5: input should be less than 0.5"),
        ("train = 3", "train = 3: input should be a table"),
        ("[train", "is not TOML"),
        ("\xff", "is not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, toml, message):
    file = tmp_path / "run.toml"
    file.write_bytes(toml.encode("latin-1"))
    with pytest.raises(UsageError) as error:
        load_config(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)
    assert "pydantic" not in str(error.value)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UsageError) as error:
        build_config({"train": {"steps": 0}, "parallel": {"pp": -1}, "dta": {}}, source="run.toml")
    assert [line.split(":")[1].split()[0] for line in str(error.value).splitlines()] == [
        "parallel.pp", "train.steps", "there",
    ]  # fmt: skip


class WithList(Section):
    """A section with a list that needs an item."""

    numbers: NonEmpty[PositiveInt] = (1,)


@pytest.mark.parametrize(("numbers", "error"), [([-1], "greater than 0"), ([], "at least 1 item")])
def test_a_wrong_item_does_not_make_a_list_too_short(numbers, error):
    with pytest.raises(UsageError) as raised:
        validate(WithList, {"numbers": numbers}, source="run.toml")
    (line,) = str(raised.value).splitlines()
    assert error in line


@pytest.mark.parametrize(("name", "says"), [
    ("nothing.toml", "no such file: "), (".", "it is a folder"), ("run", "run is the folder of a run"),
])
def test_a_missing_file_is_named(tmp_path, name, says):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").touch()
    with pytest.raises(UsageError, match=says):
        load_config(tmp_path / name)


# ---- the model's shape ---------------------------------------------------------------------------------------------


def shape(vocab=257, sequence_length=256, **fields):
    return ModelConfig(**fields).shape(vocab=vocab, sequence_length=sequence_length)


def test_the_tokenizer_decides_the_vocabulary_unless_overridden():
    assert shape(name="gpt2-124m").vocab == 257
    assert shape(name="gpt2-124m", vocab=300).vocab == 300
    assert ModelConfig(vocab=512).shape(vocab=257, sequence_length=8).vocab == 512
    with pytest.raises(UsageError, match=r"model.vocab = 100 is smaller than the tokenizer's 257 ids"):
        ModelConfig(vocab=100).shape(vocab=257, sequence_length=8)


def test_without_overrides_the_shape_is_the_catalogs():
    for name in ("tiny", "llama-3.2-3b"):
        assert shape(name=name, vocab=model_shape(name).vocab) == model_shape(name)


def test_overrides_carry_what_follows_from_them():
    wide = shape(hidden=512)
    assert (wide.head_dim, wide.heads, wide.kv_heads) == (64, 8, 4)
    many = shape(heads=16)
    assert (many.head_dim, many.kv_heads) == (16, 16)
    assert shape(heads=16, kv_heads=2, head_dim=64).head_dim == 64


def test_a_model_has_a_position_for_every_token_and_never_fewer_than_its_own():
    assert shape(name="gpt2-124m", sequence_length=2048).max_sequence == 2048
    assert shape(name="gpt2-124m", sequence_length=128).max_sequence == 1024
    assert shape(name="llama-3-8b", sequence_length=65536).max_sequence == 8192  # rotary positions have no table


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 7}, "model.hidden = 256 is not a multiple of model.heads = 7"),
        ({"kv_heads": 3}, "model.kv_heads = 3 does not divide model.heads = 8"),
        ({"head_dim": 33}, "model.head_dim = 33 is odd"),
        ({"latent": {"query_rank": 8}}, "model.latent.query_rank = 8, but the model has no latent"),
        ({"latent": {"key_value_rank": 8}}, "model.kv_heads = 4 with model.latent: every head has its own"),
        ({"kv_heads": 8, "latent": {"key_value_rank": 8, "rotary_dim": 3}}, "model.latent.rotary_dim = 3 is odd"),
        ({"kv_heads": 8, "latent": {"key_value_rank": 8, "value_dim": 99}}, "model.latent.value_dim = 99 is wider"),
        ({"kv_heads": 8, "qk_norm": True, "latent": {"key_value_rank": 8}}, "model.qk_norm with model.latent"),
        ({"experts": {"count": 4, "groups": 3}}, "model.experts.groups = 3 does not divide model.experts.count = 4"),
        ({"experts": {"count": 8, "groups": 4, "per_token": 3}}, "groups_per_token = 1 groups have 2 experts"),
        ({"name": "tiny-gpt", "latent": {"key_value_rank": 8}}, "model.latent, but model tiny-gpt is of the family"),
        ({"name": "tinny"}, "model.name = 'tinny' is not in the catalog; did you mean 'tiny'?"),
    ],
)
def test_impossible_shapes_are_refused(fields, message):
    with pytest.raises(UsageError) as error:
        shape(**fields)
    assert message in str(error.value)


def test_odd_heads_are_fine_without_rotation():
    assert shape(name="tiny-gpt", head_dim=33).head_dim == 33


def test_paths_are_a_tuple():
    assert DataConfig(paths=["a", "b"]).paths == ("a", "b")
    assert build_config({"data": {"paths": "a.txt", "mixture": {"b": {"paths": "b.txt"}}}}).data.paths == ("a.txt",)
    with pytest.raises(UsageError, match=r"data\.paths = 3: input should be a valid array"):
        build_config({"data": {"paths": 3}})


def test_old_keys_are_still_read(capfd):
    print_rename.cache_clear()
    old = {"train": {"steps": 3, "straggler": "1=2", "pace": 0.0}, "testing": {"pace": 0.5}}
    for _ in range(2):
        config = build_config(old)
        assert (config.train.steps, config.testing.straggler, config.testing.min_step_seconds) == (3, "1=2", 0.5)
    notes = "note: testing.pace is now testing.min_step_seconds\nnote: train.straggler is now testing.straggler\n"
    assert capfd.readouterr().err == notes
    with pytest.raises(UsageError, match="testing"):
        build_config({"testing": 3, "train": {"dead": "1@2"}})


OLD_KEYS = (
    "train.straggler", "train.pace", "train.dead", "train.link_gbs", "testing.pace", "testing.dead", "optimizer.rates",
    "optimizer.minimum", "failover.silence_seconds", "failover.stall_seconds",
)  # fmt: skip


@pytest.mark.parametrize("old", OLD_KEYS)
def test_an_old_key_sets_the_new_one(old):
    section, key = old.split(".")
    target, name = RENAMED_KEYS[old].split(".")
    value = {"straggler": "1=2", "dead": "1@2", "rates": {"embed.*": 0.5}}.get(key, 0.25)
    assert getattr(getattr(build_config({section: {key: value}}), target), name) == value
    assert rename_option(f"--{old.replace('_', '-')}=1") == f"--{target}.{name.replace('_', '-')}=1"


def test_old_options_are_still_read(capfd):
    assert main(["plan", "--seq", "0"]) == 2
    note, error = capfd.readouterr().err.splitlines()
    assert note == "note: --seq is now --sequence-length" and "sequence_length = 0" in error
    assert [rename_option(word) for word in ("--no-keep-going", "keep_going", "--plant=x")] == [
        "--no-auto-resume", "keep_going", "--inject=x"
    ]


@pytest.mark.parametrize(
    ("model", "title"),
    [({"module": "a/mine.py:own"}, "mine"), ({"module": "a/mine.py"}, "mine"), ({"module": "a.py", "name": "b"}, "b")],
)
def test_a_module_without_a_name_has_the_name_of_its_file(model, title):
    assert build_config({"model": model}).model.title == title


@pytest.mark.parametrize(("sections", "message"), [
    ({"trian": {"steps": 1}}, "there is no section 'trian'; did you mean 'train'?"),
    ({"train": {"stpes": 1}}, "there is no key 'train.stpes'; did you mean 'steps'?"),
    ({"train": {"steps": "3"}}, "train.steps = '3': input should be a valid integer"),
    ({"parallel": {"tp": -1}}, "parallel.tp = -1: input should be greater than 0"),
    ({"train": DataConfig()}, r"train = DataConfig\(\): it is a section.\n  Give a TrainConfig, or its fields"),
    ({"train": 3}, "train = 3: it is a section"),
])
def test_replacing_what_is_not_there_is_refused(sections, message):
    with pytest.raises(UsageError, match=f"^RunConfig.replace: {message}"):
        RunConfig().replace(**sections)
