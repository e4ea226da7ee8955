"""``Conversation``, and ``specrun chat`` as a user types it: in a pipe and in a terminal."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specrun.chat.conversation import Conversation
from specrun.chat.conversation_file import load, save
from specrun.cli import main
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.kv_cache import BLOCK
from specrun.sampling.sampler import SamplingParams
from specrun.text.chat_template import ChatTemplate
from tests.helpers.engines import make_engine, redescribe

ENDLESS = SamplingParams(temperature=0.5, seed=1, logit_bias={0: float("-inf")})
"""Answers that end by their length only."""
SAME = ("--temperature", 0.5, "--seed", 1, "--logit_bias", "0:-inf", "--max_output_len", 12)
TURNS = ("the quick brown fox", "jumps over", "the lazy dog")
FIGURES = re.compile(
    r"\[acceptance \d\.\d\d \(\d+/\d+\), \d+\.\d tokens a round, \d+\.\d tokens/s, \d+ of \d+ prompt tokens reused\]"
)


@pytest.fixture(scope="module")
def pair(onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines that take longer prompts than those of ``engines``."""
    root = tmp_path_factory.mktemp("chat")
    make_engine(onnx / "target", root / "target", max_input_len=110, max_batch_size=1, max_draft_len=4)
    make_engine(onnx / "draft", root / "draft", max_input_len=110, max_batch_size=1)
    return root


@pytest.fixture
def decoder(pair: Path) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder.open(pair / "target", pair / "draft", DraftTargetConfig(4)) as decoder:
        yield decoder


def say(conversation: Conversation, text: str) -> str:
    return "".join(piece.text for piece in conversation.say(text))


def test_every_turn_is_the_template_of_all_messages(pair: Path, decoder: SpeculativeDecoder) -> None:
    """Earlier turns are found among what is kept, and change no answer."""
    fresh = SpeculativeDecoder.open(pair / "target", pair / "draft", DraftTargetConfig(4, reuse_blocks=False))
    render = ChatTemplate.load(pair / "target").render
    with fresh:
        kept, read = (Conversation(each, ENDLESS, system="be brief", max_output_len=12) for each in (decoder, fresh))
        known = 0
        for turn, text in enumerate(TURNS):
            answer = say(kept, text)
            assert answer == say(read, text)
            *asked, answered = kept.messages
            assert [message["role"] for message in asked] == ["system", *["user", "assistant"] * turn, "user"]
            assert answered == {"role": "assistant", "content": answer}
            assert kept.last and read.last
            assert kept.last.prompt == decoder.tokenizer.encode(render(asked), add_special_tokens=False).ids
            assert kept.last.output == read.last.output
            assert read.last.stats.cached == 0
            # At least the whole blocks of the last prompt; an answer's text may have other ids than it was written in.
            assert kept.last.stats.cached >= known // BLOCK * BLOCK
            assert (kept.last.stats.cached > 0) == (turn > 0)
            known = len(kept.last.prompt) - 1


def test_an_answer_that_is_stopped_is_what_was_shown(decoder: SpeculativeDecoder) -> None:
    whole = Conversation(decoder, ENDLESS, max_output_len=40)
    stopped = Conversation(decoder, ENDLESS, max_output_len=40)
    assert say(whole, TURNS[0])
    answer = stopped.say(TURNS[0])
    shown = "".join(next(answer).text for _ in range(5))
    answer.close()
    assert shown
    assert stopped.messages[-1] == {"role": "assistant", "content": shown}
    assert whole.messages[-1]["content"].startswith(shown)
    assert stopped.last and stopped.last.finish_reason == "cancelled"
    assert len(decoder.scheduler) == 0
    assert say(stopped, "on")


def test_a_turn_without_any_answer_is_forgotten(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    conversation = Conversation(decoder, ENDLESS, system="be brief", max_output_len=12)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decoder.scheduler.round, "step", interrupt)
        say(conversation, TURNS[0])
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    assert say(conversation, TURNS[0]) == say(
        Conversation(decoder, ENDLESS, system="be brief", max_output_len=12), TURNS[0]
    )


def test_a_refused_turn_changes_nothing(decoder: SpeculativeDecoder) -> None:
    conversation = Conversation(decoder, ENDLESS, max_output_len=12)
    say(conversation, TURNS[0])
    messages, last = list(conversation.messages), conversation.last
    with pytest.raises(RequestError, match=r"conversation: .* max_input_len is 110"):
        say(conversation, "dog " * 110)
    assert (conversation.messages, conversation.last) == (messages, last)
    assert say(conversation, TURNS[1])
    conversation.reset()
    assert conversation.messages == []


def chat(pair: Path, *options: object, turns: str) -> Result:
    flags = ("--engine_dir", pair / "target", "--draft_engine_dir", pair / "draft", "--draft_len", 4)
    return CliRunner().invoke(main, [str(part) for part in ("chat", *flags, *options)], input=turns)


def test_a_pipe_has_a_turn_a_line(pair: Path, decoder: SpeculativeDecoder) -> None:
    conversation = Conversation(decoder, ENDLESS, system="be brief", max_output_len=12)
    answers = [say(conversation, text) for text in TURNS[:2]]
    turns = "\n".join([*TURNS[:2], "dog " * 110, "/reset", "", TURNS[0], "/exit", TURNS[0]])
    shown = chat(pair, *SAME, "--system", "be brief", turns=turns)
    assert shown.exit_code == 1, "for scripts: a turn was refused"
    assert shown.stdout == "".join(f"{answer}\n" for answer in (*answers, answers[0]))
    first, second, refused, third = shown.stderr.splitlines()
    assert all(FIGURES.fullmatch(line) for line in (first, second, third)), shown.stderr
    assert ", 0 of" in first
    assert ", 0 of" not in second
    assert "error: conversation: " in refused


def test_colours_are_the_drafts_and_change_no_text(pair: Path) -> None:
    plain, green = (chat(pair, *SAME, *color, turns=TURNS[0]).stdout for color in ((), ("--color",)))
    assert "\x1b" not in plain
    drafted = re.findall(r"\x1b\[32m(.*?)\x1b\[0m", green, re.DOTALL)
    assert drafted
    assert re.sub(r"\x1b\[\d+m", "", green) == plain


def test_thoughts_are_dimmed_and_kept_apart(pair: Path, tmp_path: Path) -> None:
    """The prompt has begun the thought, and a random model does not end it."""
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }}{% endfor %}<think>{# </think> #}")
    shown = chat(pair, *SAME, "--color", "--chat_template", tmp_path / "template", turns=TURNS[0]).stdout
    texts = [text for text in re.split(r"\x1b\[0m", shown) if text.strip()]
    assert texts and all("\x1b[2m" in text for text in texts)
    opened = SpeculativeDecoder.open(pair / "target", chat_template=tmp_path / "template")
    with opened as decoder:
        conversation = Conversation(decoder, ENDLESS, max_output_len=8)
        said = say(conversation, "the fox")
        assert conversation.messages[-1] == {"role": "assistant", "content": "", "reasoning_content": said.lstrip()}


def test_a_new_seed_is_shown_and_makes_the_same_answer(pair: Path) -> None:
    options = ("--temperature", 1, "--max_output_len", 12)
    first = chat(pair, *options, turns=TURNS[0])
    seed = re.match(r"seed (\d+)\n", first.stderr)
    assert seed
    assert chat(pair, *options, "--seed", seed[1], turns=TURNS[0]).stdout == first.stdout


def test_mistakes_are_one_line(pair: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(pair / "target", tmp_path / "target")
    (plain / "chat_template.jinja").unlink()
    redescribe(plain)
    shown = CliRunner().invoke(main, ["chat", "--engine_dir", str(plain)], input="one\ntwo\n")
    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (1, "", 1)
    assert "no chat template" in shown.stderr
    shown = CliRunner().invoke(main, ["chat", "--engine_dir", str(plain), "--acceptance", "logits"])
    assert shown.exit_code == 2
    assert "--acceptance needs a draft" in shown.stderr


SLOW = """
import sys, time
from specrun.text.chat_template import ChatTemplate
from specrun.cli import main
from specrun.speculative.host_round import HostRound

def step(*args, plain=HostRound.step, seconds=float(sys.argv.pop(1))):
    print("(round)", file=sys.stderr, flush=True)
    time.sleep(seconds)
    return plain(*args)

HostRound.step = step
main(prog_name="specrun")
"""


class Terminal:
    """``specrun chat`` in a terminal, with rounds that take ``seconds``, long enough to be interrupted."""

    def __init__(self, seconds: float, *options: object, term: str = "dumb") -> None:
        pty = pytest.importorskip("pty", reason="needs a Unix terminal")
        self.keys, end = pty.openpty()
        self.seen = ""
        command = [sys.executable, "-c", SLOW, str(seconds), "chat", *map(str, options)]
        environment = {**os.environ, "TERM": term, "COLUMNS": "120"}
        environment.pop("NO_COLOR", None)
        # The terminal is its controlling one, so that Ctrl-C is a key.
        self.process = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )  # fmt: skip
        os.close(end)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.keys)

    def type(self, keys: str) -> None:
        os.write(self.keys, keys.encode())

    def until(self, shown: Callable[[str], bool]) -> str:
        """Read until ``shown``; returns what came since the last time."""
        text = ""
        while not shown(text):
            more = self._read()
            assert more, self.seen
            text += more
        return text

    def end(self) -> int:
        """The exit status, when everything is read."""
        while self._read():
            pass
        return self.process.wait(60)

    def _read(self) -> str:
        assert select.select([self.keys], [], [], 60)[0], self.seen
        try:
            more = os.read(self.keys, 4096).decode(errors="replace")
        except OSError:  # The program has ended.
            return ""
        self.seen += more
        return more


def prompted(text: str) -> bool:
    return text.endswith("\n> ")


def test_ctrl_c_stops_an_answer_and_then_the_chat(pair: Path) -> None:
    """A drafted answer of 60 tokens takes some seconds here; the second turn has the stopped one in its history."""
    flags = ("--engine_dir", pair / "target", "--draft_engine_dir", pair / "draft", "--draft_len", 4)
    with Terminal(0.2, *flags, *SAME[:-1], 60) as terminal:
        assert "/help lists" in terminal.until(prompted)
        terminal.type(f"{TURNS[0]}\r")
        terminal.until(lambda text: "\x1b[32m" in text)
        terminal.type("\x03")
        stopped = terminal.until(prompted)
        figures = FIGURES.search(stopped)
        assert figures, stopped
        assert f"\x1b[2m{figures[0]}\x1b[0m" in stopped
        terminal.type("on\r")
        terminal.until(lambda text: "\x1b[32m" in text)
        terminal.type("\x03")
        answered = terminal.until(prompted)
        reused = re.search(r"(\d+) of \d+ prompt tokens reused", answered)
        assert reused and int(reused[1]) >= BLOCK
        time.sleep(0.3)  # A signal between the prompt and readline's wait for a key would be seen with the next key.
        terminal.type("\x03")
        assert terminal.end() == 0
    assert "Traceback" not in terminal.seen
    assert "error" not in terminal.seen


def test_a_second_ctrl_c_ends_the_program(pair: Path) -> None:
    with Terminal(60, "--engine_dir", pair / "target") as terminal:
        terminal.until(prompted)
        terminal.type(f"{TURNS[0]}\r")
        terminal.until(lambda text: "(round)" in text)
        for _ in range(2):
            assert terminal.process.poll() is None
            terminal.type("\x03")
            time.sleep(0.5)
        assert terminal.end() == 130
    assert "Traceback" not in terminal.seen


def test_pasted_lines_are_one_turn_and_ctrl_c_clears_a_line(pair: Path, tmp_path: Path) -> None:
    ready = "\x1b[?2004h> "  # Bracketed paste is on.
    saved = tmp_path / "saved.json"
    with Terminal(0, "--engine_dir", pair / "target", *SAME, term="xterm") as terminal:
        assert "loading " in terminal.until(lambda text: text.endswith(ready))
        terminal.type("\x1b[200~the quick\nbrown fox\x1b[201~")
        terminal.until(lambda text: "brown fox" in text)
        assert "tokens/s" not in terminal.seen, "it waits for Enter"
        terminal.type("\r")
        terminal.until(lambda text: text.endswith(ready))
        terminal.type("never sent")
        terminal.until(lambda text: "never sent" in text)
        time.sleep(0.3)
        terminal.type("\x03")
        terminal.until(lambda text: text.endswith(ready))
        terminal.type(f"/save {saved}\r")
        terminal.until(lambda text: text.endswith(ready))
        time.sleep(0.3)
        terminal.type("\x03")
        assert terminal.end() == 0
    assert terminal.seen.count("tokens/s") == 1
    asked, _ = load(saved)
    assert asked == {"role": "user", "content": "the quick\nbrown fox"}


# --- commands


def test_commands(pair: Path, decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    conversation = Conversation(decoder, ENDLESS, max_output_len=12)
    plain = say(conversation, TURNS[0])
    conversation.set_system("be brief")
    second = say(conversation, TURNS[1])
    again = "".join(output.text for output in conversation.retry())
    file = tmp_path / "saved.json"
    turns = ("/help", "/stats", TURNS[0], "/system be brief", "/system", TURNS[1], "/retry", f"/save {file}", "/stats")
    shown = chat(pair, *SAME, turns="\n".join((*turns, "/reset", "/retry", f"/load {file}", "/retry", "/no", "/save")))
    assert shown.exit_code == 1
    *answers, last = shown.stdout.splitlines()
    assert "\n".join(answers) == "\n".join((plain, second, again))
    for said in (
        "/retry           answer",
        "nothing was answered yet",
        "be brief\n",
        "5 messages saved",
        "tokens a round",
    ):
        assert said in shown.stderr, said
    assert re.search(r"context: \d+ of 128 tokens", shown.stderr)
    assert "error: no turn was answered" in shown.stderr, "after /reset"
    assert "error: /no: no such command; /help lists them" in shown.stderr
    assert "error: /save: expected a file's name" in shown.stderr
    assert load(file) == [{"role": "system", "content": "be brief"}, *conversation.messages[1:]]
    assert last == again, "of the same seed, as the loaded turn is answered again for the first time"


def test_a_turn_may_begin_with_a_slash(pair: Path, decoder: SpeculativeDecoder) -> None:
    answer = say(Conversation(decoder, ENDLESS, max_output_len=12), "/usr is a directory")
    assert chat(pair, *SAME, turns=" /usr is a directory").stdout == f"{answer}\n"


def test_retry_has_another_seed(decoder: SpeculativeDecoder) -> None:
    conversation = Conversation(decoder, ENDLESS, max_output_len=12)
    with pytest.raises(RequestError, match="nothing to answer again"):
        next(conversation.retry())
    first = say(conversation, TURNS[0])
    answers = {first, *("".join(output.text for output in conversation.retry()) for _ in range(3))}
    assert len(answers) > 1
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    fresh = Conversation(decoder, ENDLESS.seeded(3), max_output_len=12)
    assert conversation.messages[1]["content"] == say(fresh, TURNS[0])


def test_the_oldest_turns_are_dropped_when_the_context_is_full(pair: Path, decoder: SpeculativeDecoder) -> None:
    conversation = Conversation(decoder, ENDLESS, system="be brief", max_output_len=12, drop_oldest=True)
    dropped = []
    for number in range(8):
        before = len(conversation.messages)
        assert say(conversation, f"{TURNS[0]} {number}")
        assert len(conversation.messages) == before - conversation.dropped + 2
        assert conversation.messages[0] == {"role": "system", "content": "be brief"}
        assert conversation.messages[1]["role"] == "user"
        dropped.append(conversation.dropped)
        if conversation.dropped:
            assert conversation.last and len(conversation.last.prompt) <= 110 // 2
    assert any(dropped) and not all(dropped[3:]), "not at every turn"
    assert all(count % 2 == 0 for count in dropped)
    assert [message["content"] for message in conversation.messages[-2:-1]] == [f"{TURNS[0]} 7"]
    messages = list(conversation.messages)
    with pytest.raises(RequestError, match=r"max_input_len is 110"):
        say(conversation, "dog " * 110)
    assert conversation.messages == messages, "a turn that never fits changes nothing"
    shown = chat(pair, *SAME, "--system", "be brief", turns="\n".join(f"{TURNS[0]} {number}" for number in range(8)))
    assert shown.exit_code == 0
    notes = re.findall(r"the context is full; the (\d+) oldest messages are forgotten", shown.stderr)
    assert [int(count) for count in notes] == [count for count in dropped if count]


def test_a_conversation_that_is_not_to_forget_says_so(decoder: SpeculativeDecoder) -> None:
    conversation = Conversation(decoder, ENDLESS, max_output_len=12)
    with pytest.raises(RequestError, match="conversation: "):
        for number in range(8):
            say(conversation, f"{TURNS[0]} {number}")


@pytest.mark.parametrize("content", ["{", "[]", '{"messages": 1}', '{"messages": [{"role": "user"}]}', "[" * 10**5])
def test_files_that_are_no_conversations_are_left_alone(tmp_path: Path, content: str) -> None:
    file = tmp_path / "notes"
    file.write_text(content)
    for use in (load, lambda path: save([], path)):
        with pytest.raises(RequestError, match="no conversation"):
            use(file)
    assert file.read_text() == content
    with pytest.raises(RequestError, match="nothing was saved"):
        save([], tmp_path / "none" / "file")
    assert list(tmp_path.iterdir()) == [file]


def test_a_template_of_ones_own(pair: Path, decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    shown = chat(pair, *SAME, "--chat_template", tmp_path / "own.jinja", turns=TURNS[0])
    (wanted,) = decoder.generate(
        decoder.tokenizer.encode(f"{TURNS[0]}<|endoftext|>", add_special_tokens=False).ids, ENDLESS, max_output_len=12
    )
    assert shown.stdout == f"{wanted.text}\n"
    for content, reason in (("{% if %}", "the chat template failed"), ("", "no chat template")):
        (tmp_path / "bad.jinja").write_text(content)
        shown = chat(pair, "--chat_template", tmp_path / "bad.jinja", turns=TURNS[0])
        assert (shown.exit_code, shown.stdout) == (1, "")
        assert reason in shown.stderr
    assert "cannot be read" in chat(pair, "--chat_template", tmp_path / "none", turns=TURNS[0]).stderr
