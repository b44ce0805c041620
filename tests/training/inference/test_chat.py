"""A conversation: what the model is shown, how a reply ends, and the command."""

import io
import json
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import shoal
from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.data.chat import PLAIN, PLAIN_STOP, ChatTemplate
from tests.training.inference.models import export_fresh
from tests.trainings.runs import small_config, train_in

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be short."}, {"role": "user", "content": " Hello "},
    {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And?"},
]  # fmt: skip


@pytest.fixture(scope="module")
def run(corpus, pool, tmp_path_factory):
    config = small_config(corpus, {"micro_batch": 8}, data={"sequence_length": 64}, train={"steps": 4})
    return train_in(pool, config, tmp_path_factory.mktemp("chat") / "run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus):
    """An untrained model with a tokenizer of bytes and special tokens, and a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    export_fresh(small_config(corpus, model={"vocab": 300}).model.shape(vocab=300, sequence_length=256), folder)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    words.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    words.save(str(folder / "tokenizer.json"))
    start = {"__type": "AddedToken", "content": "<|endoftext|>"}
    values = {"chat_template": TEMPLATE, "bos_token": start, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def test_a_template_writes_what_transformers_writes(folder):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTemplate.find([folder])
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.render(MESSAGES) == expected
    assert ours.names == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    with pytest.raises(UsageError, match="refuses these messages: no tools"):
        ours.render([{"role": "tool", "content": ""}])


@pytest.mark.parametrize("template", [
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "{% for m in messages %}\n  {%- generation -%}\n  {{ m.content }} \n{%- endgeneration %} |\n{% endfor %}",
    "{{ messages | tojson(indent=2, sort_keys=True) }}",
])
def test_tags_and_filters_of_transformers_are_known(template, folder):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder, chat_template=template)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False)
    assert ChatTemplate(template, {}).render(MESSAGES, reply=False) == expected


def test_a_template_cannot_reach_python():
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(UsageError, match="refuses these messages"):
        template.render(MESSAGES)
    with pytest.raises(UsageError, match="is not valid"):
        ChatTemplate("{% if %}", {})


def test_the_place_of_a_template(tmp_path, folder):
    assert ChatTemplate.find([tmp_path]).stop == PLAIN_STOP
    named = {"chat_template": [{"name": "tool_use", "template": "c"}, {"name": "default", "template": "a"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert ChatTemplate.find([tmp_path, folder]).render([]) == "a"
    (tmp_path / "chat_template.jinja").write_text("b")
    assert ChatTemplate.find([tmp_path, folder]).render([]) == "b"
    plain = ChatTemplate(PLAIN, {}).render(MESSAGES)
    assert plain == "System: Be short.\nUser:  Hello \nAssistant: Hi.\nUser: And?\nAssistant:"


def seen(monkeypatch, answers):
    """What the model is shown, as ids; it then says the given texts."""
    prompts = []

    def continue_texts(model, source, prompts_, sampling, show):
        prompts.append((prompts_[0], source.ends, sampling))
        show(next(answers))

    monkeypatch.setattr("shoal.training.inference.chat.continue_texts", continue_texts)
    return prompts


def test_the_model_is_shown_the_conversation_with_special_tokens(folder, monkeypatch):
    prompts = seen(monkeypatch, iter([" Hi. ", "So."]))
    chat = shoal.open_chat(folder, system="Be short.", max_tokens=8)
    shown = []
    assert chat.reply("Hello", shown.append) == "Hi." and shown == [" Hi. "]
    assert chat.reply("And?") == "So."
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 2]
    start, end = (chat.source.tokenizer.find(token) for token in ("<|im_start|>", "<|im_end|>"))
    (first, ends, sampling), (second, _, later) = prompts
    assert first.count(start) == 3 and second.count(start) == 5 and second.count(end) == 4
    assert end in ends and later.seed == sampling.seed + 1
    assert chat.source.tokenizer.encode("<|im_end|>").tolist() != [end]  # in a text it is text


def test_the_oldest_messages_are_left_out_when_the_window_is_full(run, monkeypatch):
    prompts = seen(monkeypatch, iter(["x" * 10] * 4))
    chat = shoal.open_chat(run, system="S", max_tokens=8)
    for message in "abcd":
        chat.reply(message * 10)
    assert all(len(ids) <= 64 - 8 for ids, *_ in prompts)
    assert bytes(prompts[1][0]).decode() == f"System: S\nUser: {'b' * 10}\nAssistant:"


def test_a_reply_is_that_of_sample(run):
    chat = shoal.open_chat(run, max_tokens=8, seed=3)
    text = "User: hello\nAssistant:"
    (expected,) = shoal.sample(run, text, max_tokens=8, seed=3, stop=PLAIN_STOP)
    assert chat.reply("hello") == expected.removeprefix(text).strip()


def test_an_interrupted_reply_ends_there(run, monkeypatch):
    def continue_texts(model, source, prompts, sampling, show):
        show("half a")
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.training.inference.chat.continue_texts", continue_texts)
    chat = shoal.open_chat(run)
    assert chat.reply("hello") == "half a" and chat.messages[-1] == {"role": "assistant", "content": "half a"}


def test_the_command_reads_lines(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand?\n"))
    assert main(["chat", str(run), "--max-tokens", "5", "--temperature", "0"]) == 0
    chat = shoal.open_chat(run, max_tokens=5, temperature=0)
    expected = []
    for message in ("hello", "and?"):
        chat.reply(message, expected.append)
        expected.append("\n")
    from shoal.base.terminal import printable

    assert capsys.readouterr().out == printable("".join(expected))
