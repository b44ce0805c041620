"""Conversations: which tokens count, complete ones in each sequence, and what is refused."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.data.batches import open_complete, open_dataset
from shoal.engine.data.chat import ConversationEncoder
from shoal.engine.data.prepare import export_megatron
from shoal.engine.data.shards import open_shards
from shoal.engine.data.token_stream import CacheManifest
from shoal.engine.data.tokenizer import BytesTokenizer, load_tokenizer
from shoal.engine.models.loss import IGNORE
from shoal.spec.config import DataConfig

BYTES = BytesTokenizer()
END = BYTES.end_of_document
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversation(i: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Be kürzer."}] if i % 3 == 0 else []
    for turn in range(i % 4 + 1):
        messages.append({"role": "user", "content": f"Question {i} {turn}?"})
        messages.append({"role": "assistant", "content": f"Antwort {i} {turn}, größer. 🐟"})
    return messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of bytes and special tokens, with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    words.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    words.save(str(folder / "tokenizer.json"))
    plain = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    values = {"chat_template": plain, "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def config_for(tmp_path, conversations, **settings) -> DataConfig:
    lines = [json.dumps({"messages": messages}) for messages in conversations]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    settings = {"sequence_length": 256, "validation_fraction": 0.1} | settings
    return DataConfig(paths=[str(tmp_path / "chat.jsonl")], cache=tmp_path / "cache", chat=True, **settings)


@pytest.mark.parametrize("turns", range(4))
def test_the_assistants_words_count(turns):
    messages = conversation(turns)
    ((ids, counts),) = ConversationEncoder(BYTES).encode(messages)
    assert ids[-1] == END and counts[-1]
    kept = BYTES.decode(ids[counts])
    assert kept == "".join(f" {m['content']}\n" for m in messages if m["role"] == "assistant")
    assert BYTES.decode(ids) == "".join(f"{m['role'].capitalize()}: {m['content']}\n" for m in messages)
    ((_, counts),) = ConversationEncoder(BYTES).encode([*messages, {"role": "user", "content": "And?"}])
    assert not counts[-1]


@pytest.mark.parametrize("turns", range(4))
def test_ids_and_masks_are_those_of_transformers(folder, turns):
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|endoftext|>")
    found = theirs.apply_chat_template(
        conversation(turns), chat_template=TEMPLATE, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ((ids, counts),) = ConversationEncoder(tokenizer).encode(conversation(turns))
    assert ids[:-1].tolist() == found["input_ids"]
    assert counts[:-1].tolist() == [bool(mask) for mask in found["assistant_masks"]]


@pytest.mark.parametrize("named", [False, True])
def test_each_sequence_holds_complete_conversations(tmp_path, folder, named):
    tokenizer = {"tokenizer": str(folder / "tokenizer.json")} if named else {}
    conversations = [conversation(i) for i in range(60)]
    config = config_for(tmp_path, conversations, document_mask=True, sequence_length=320, **tokenizer)
    encoder = ConversationEncoder(load_tokenizer(config.tokenizer))
    encoded = [each for messages in conversations for each in encoder.encode(messages)]
    expected = sorted(ids.tolist() for ids, _ in encoded)
    found, counted = [], 0
    for split in ("train", "validation"):
        dataset = open_dataset(config, seed=0, split=split)
        batch = dataset.batch(range(dataset.samples))
        counted += batch.unmasked()
        for tokens, documents in zip(batch.tokens, batch.documents, strict=True):
            pieces = [tokens[documents == number].tolist() for number in range(int(documents.max()) + 1)]
            found += [piece for piece in pieces if piece != [encoded[0][0][-1]]]
    assert sorted(found) == expected
    assert counted == sum(counts.sum() for _, counts in encoded)


def test_targets_are_the_next_tokens_of_the_assistant_alone(tmp_path):
    config = config_for(tmp_path, [conversation(1)] * 4, validation_fraction=1e-9)
    batch = open_dataset(config, seed=0, split="train").batch([0])
    assert batch.documents is None
    kept = batch.targets[:, :-1] != IGNORE
    assert torch.equal(batch.targets[:, :-1][kept], batch.tokens[:, 1:][kept])
    text = BYTES.decode(batch.targets[0][batch.targets[0] != IGNORE].tolist())
    assert text.startswith(" Antwort 1 0, größer. 🐟\n Antwort 1 1") and "Question" not in text
    complete = open_complete(config.model_copy(update={"validation_fraction": 1.0}))
    total = sum(ConversationEncoder(BYTES).encode(conversation(1))[0][1].sum() for _ in range(4))
    assert complete.batch(range(complete.samples + 2)).unmasked() == total


def test_conversations_that_do_not_fit_are_counted(tmp_path, capsys):
    without = [{"role": "user", "content": "Hello?"}]
    config = config_for(tmp_path, [conversation(1), conversation(3), without, []], sequence_length=150,
                        unreadable="skip", validation_fraction=1e-9)
    manifest = CacheManifest.read(open_shards(config, BYTES))
    assert {reason: info.documents for reason, info in manifest.skipped.items()} == {
        "longer than data.sequence_length": 1, "without a message of the assistant": 1, "not a conversation": 1,
    }
    assert manifest.splits["train"].documents == 1
    with pytest.raises(UsageError, match="do not say which ids count"):
        export_megatron(config, tmp_path / "out")
    with pytest.raises(UsageError, match=r"validation split .* has no documents. Left out:(.|\n)*1 longer than"):
        open_dataset(config, seed=0, split="validation")
    longer = config.model_copy(update={"sequence_length": 512})
    assert CacheManifest.read(open_shards(longer, BYTES)).splits["train"].documents == 2
    words = ["--data.paths", *config.paths, "--data.chat", "--data.unreadable", "skip", "--data.validation-fraction"]
    assert main(["data", "inspect", *words, "1e-9", "--data.cache", str(config.cache)]) == 0
    assert "1 not a conversation; the first: " in capsys.readouterr().out


@pytest.mark.parametrize("value", [[], "text", [{"role": "user"}], [{"role": 1, "content": "x"}], ["x"], None])
def test_what_is_no_conversation_is_named(tmp_path, value):
    with pytest.raises(UsageError, match=r"line 1: the field 'messages' holds no list of messages") as refused:
        open_shards(config_for(tmp_path, [value]), BYTES)
    assert ("; the first message has role." in str(refused.value)) == (value == [{"role": "user"}])


THINKING = (  # the last message alone has its reasoning, as in Qwen3's
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' and loop.last %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def test_where_reasoning_is_left_out_later_each_reply_is_a_document(tmp_path, folder):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(THINKING)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    messages = conversation(1)
    first, second = ConversationEncoder(tokenizer).encode(messages)
    question = "<|im_start|>user\nQuestion 1 {0}?<|im_end|>\n<|im_start|>assistant\n"
    reply = "<think>\n\n</think>\n\nAntwort 1 {0}, größer. 🐟<|im_end|>\n"
    read = question.format(0), question.format(0) + "Antwort 1 0, größer. 🐟<|im_end|>\n" + question.format(1)
    for turn, (ids, counts) in enumerate((first, second)):
        before, spoken = tokenizer.encode_chat(read[turn]), tokenizer.encode_chat(reply.format(turn))
        assert ids.tolist() == [*before, *spoken, tokenizer.end_of_document]
        assert counts.tolist() == [False] * len(before) + [True] * (len(spoken) + 1)
    config = config_for(tmp_path, [messages], tokenizer=str(tokenizer.path), validation_fraction=1e-9)
    split = CacheManifest.read(open_shards(config, tokenizer)).splits["train"]
    assert (split.documents, split.bytes) == (2, len(json.dumps(messages, ensure_ascii=False).encode()))


def test_a_template_that_changes_messages_for_a_reply_is_refused(tmp_path, folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    template = "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    config = config_for(tmp_path, [conversation(3)], tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"writes message \d otherwise"):
        open_shards(config, load_tokenizer(config.tokenizer))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UsageError, match=r"a\.txt is plain text, without messages"):
        open_shards(config.model_copy(update={"paths": (str(tmp_path / "a.txt"),)}), BYTES)
