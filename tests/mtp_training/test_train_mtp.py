"""Training of an MTP head on a tiny random model: the loss falls, stopping changes nothing, errors are named."""

from __future__ import annotations

import gzip
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import train_mtp
from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.mtp_training import corpus as corpus_files
from headrace.mtp_training.acceptance import measure
from headrace.mtp_training.batches import Vocabulary, batch_plan
from headrace.mtp_training.corpus import CorpusError, read_corpus, shard_path
from headrace.mtp_training.head_file import HeadFileError, read_head, save_head
from headrace.mtp_training.loop import StateError
from headrace.mtp_training.loss import Distill
from headrace.mtp_training.module import HeadModule
from headrace.mtp_training.prompts import PromptFileError, Prompts, read_prompts
from headrace.mtp_training.start import fresh_head
from headrace.mtp_training.writer import Writer, Written
from headrace_kernels.upload import tensor_of
from helpers.models.tiny_model import tiny_llama

SMALL = shlex.split(
    "--dtype float32 --files 0-1 --held-out-files 0 --answer-tokens 12 --prompt-tokens 24 --ffn 64 "
    "--draft-vocabulary 100 --epochs 20 --batch-rows 96 --learning-rate 1e-2 --device cpu"
)


@pytest.fixture(autouse=True)
def _few_sequences(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """A file of a corpus holds four answers, so that tiny ones have several files."""
    monkeypatch.setattr(corpus_files, "SEQUENCES", 4)
    monkeypatch.setattr(train_mtp, "SAVE_EVERY", 3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def run(model: Path, out: Path, *more: str) -> int:
    return train_mtp.main(["--model", str(model), "--out", str(out), *SMALL, *more])


def head_of(model: Path, ffn: int = 64) -> HeadModule:
    return fresh_head(SafetensorsCheckpoint(model), ffn)


def text_of(model: Path, answer_tokens: int = 10) -> list[Written]:
    checkpoint = SafetensorsCheckpoint(model)
    writer = Writer(
        checkpoint, dtype="float32", lanes=3, most_tokens=40, answer_tokens=answer_tokens
    )
    prompts = Prompts("training", seed=3)
    return list(writer.write((i, prompts[i], 0.7 * (i % 2)) for i in range(5)))


def test_a_run_makes_a_head_that_foresees_more_than_before(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(model, out) == 0
    report = json.loads((out / "mtp.json").read_text())
    curve = report["curve"]
    assert curve[-1]["by_pass"][0] < 0.95 * curve[0]["by_pass"][0]
    assert [len(point["by_pass"]) for point in curve] == sorted(len(p["by_pass"]) for p in curve)
    assert {len(point["by_pass"]) for point in curve} == {1, 2, 3}
    assert sum(found["answers"] for found in report["acceptance"].values()) == 4
    assert all(0 <= p <= 1 for f in report["acceptance"].values() for p in f["by_position"])
    assert (out / "mtp.png").stat().st_size > 1000

    tensors = load_file(out / "mtp.safetensors")
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    assert shapes == {
        "enorm.weight": (64,),
        "hnorm.weight": (64,),
        "eh_proj.weight": (64, 128),
        "input_layernorm.weight": (64,),
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.v_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 64),
        "post_attention_layernorm.weight": (64,),
        "mlp.gate_proj.weight": (64, 64),
        "mlp.up_proj.weight": (64, 64),
        "mlp.down_proj.weight": (64, 64),
        "norm.weight": (64,),
        "draft_token_ids": (100,),
    }
    assert tensors.pop("draft_token_ids").dtype == torch.int32
    assert {value.dtype for value in tensors.values()} == {torch.float16}
    assert report["head"]["bytes"] == (out / "mtp.safetensors").stat().st_size


def test_training_goes_on_to_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(model, whole) == 0

    def stop(done: int, total: int, point: object) -> None:
        if done == 7:
            raise KeyboardInterrupt

    class Stopping:
        def __init__(self, _label: str) -> None:
            self.step = stop

        def __call__(self, done: int, total: int) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(train_mtp, "Bar", Stopping)
        assert run(model, parts) == 130
    assert (parts / "state.pt").exists()
    assert run(model, parts) == 0
    assert (parts / "mtp.safetensors").read_bytes() == (whole / "mtp.safetensors").read_bytes()


def test_a_head_is_trained_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(model, out) == 0
    first = (out / "mtp.safetensors").rename(tmp_path / "first.safetensors")
    more = ("--start", str(first), "--epochs", "1", "--learning-rate", "1e-3")
    assert run(model, out, *more) == 1
    assert "belongs to other settings or data" in capsys.readouterr().err
    (out / "state.pt").unlink()
    before = json.loads((out / "mtp.json").read_text())["curve"]
    assert run(model, out, *more) == 0
    after = json.loads((out / "mtp.json").read_text())["curve"]
    assert after[0]["by_pass"][0] < before[0]["by_pass"][0]
    assert run(model, out, "--start", str(tmp_path / "none.safetensors")) == 1
    assert "none.safetensors: cannot be read" in capsys.readouterr().err


def test_text_does_not_depend_on_where_the_writing_stopped(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(model, out) == 0
    before = read_corpus(out / "corpus", range(2))
    shard_path(out / "corpus", 0).unlink()
    assert run(model, out) == 0
    assert read_corpus(out / "corpus", range(2)).digest == before.digest
    assert before.sequences[0].hidden.shape == (len(before.sequences[0].tokens) - 1, 64)


def test_what_is_kept_is_what_the_model_says(model: Path) -> None:
    """The hidden state times the head gives the logits whose best ones are kept, and greedy text follows them."""
    embedding = tensor_of(SafetensorsCheckpoint(model).tensor("model.embed_tokens.weight"))
    for s in text_of(model):
        logits = torch.from_numpy(s.hidden.astype(np.float32)) @ embedding.T
        kept = logits.gather(1, torch.from_numpy(s.top_ids).long())
        difference = kept - kept[:, :1] - torch.from_numpy(s.top_logits - s.top_logits[:, :1])
        assert difference.abs().max() < 2e-2  # fp16
        if not s.temperature:
            answer = s.tokens[s.prompt_len :]
            assert (s.top_ids[s.prompt_len - 1 :, 0] == answer).all()


def test_an_unrolled_pass_is_what_a_drafter_computes_step_by_step(model: Path) -> None:
    torch.manual_seed(0)
    head = head_of(model)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows, passes = 9, 3
    embedded, hidden = torch.randn(1, rows, 64), torch.randn(1, rows, 64)
    with torch.inference_mode():
        outputs = head.unroll(embedded, hidden, passes)
        for start in range(rows - passes + 1):
            # Drafting from `start`: rows up to it read the model's hidden states, later ones the pass before.
            seen = hidden[:, : start + 1]
            for m in range(passes):
                row = start + m
                out = head.unroll(embedded[:, : row + 1], seen, 1)[0]
                torch.testing.assert_close(outputs[m][0, row], out[0, row], rtol=1e-4, atol=1e-4)
                seen = torch.cat([seen, out[:, row : row + 1]], 1)


def test_the_loss_is_the_cross_entropy_and_has_its_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(700, 16, requires_grad=True)
    head, ids, p = torch.randn(50, 16), torch.randint(0, 50, (700, 4)), torch.rand(700, 4)
    expected = -(p * (x @ head.T).log_softmax(1).gather(1, ids)).sum()
    (gradient,) = torch.autograd.grad(expected, x)
    loss = Distill.apply(x, head, ids, p)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], gradient, rtol=1e-4, atol=1e-4)


class Oracle(HeadModule):
    """Foresees what it is told to."""

    answers: torch.Tensor  # [passes, rows, hidden]

    def unroll(
        self, embedded: torch.Tensor, hidden: torch.Tensor, passes: int
    ) -> list[torch.Tensor]:
        del hidden
        return [self.answers[m, None, : embedded.shape[1]] for m in range(passes)]


@pytest.mark.parametrize(
    ("wrong", "by_position", "tokens_per_forward"),
    [
        # Ten tokens follow the answer's first one. The last passes find fewer left to draft.
        ([], [1, 1, 1], [2.0, 2.75, 3.67]),
        ([0, 1, 2], [0, 0, 0], [1.0, 1.0, 1.0]),
        ([1], [1, 0, 0], [2.0, 2.0, 2.0]),
    ],
)
def test_acceptance_counts_drafts_whose_predecessors_are_right(
    model: Path, wrong: Sequence[int], by_position: list[float], tokens_per_forward: list[float]
) -> None:
    (s,) = [s for s in text_of(model, answer_tokens=11) if s.index == 0]
    assert s.temperature == 0 and len(s.tokens) == s.prompt_len + 11
    vocab = SafetensorsCheckpoint(model).config.vocab_size
    head = Oracle(head_of(model).shape, torch.ones(8))
    width = vocab  # the "hidden state" is the logits, the "head" is the identity
    head.answers = torch.zeros(3, len(s.tokens) - 2, width)
    never = next(token for token in range(vocab) if token not in s.tokens)
    for m in range(3):
        for t in range(len(s.tokens) - 2):
            head.answers[m, t, never if m in wrong else s.tokens[t + 2]] = 1
    vocabulary = Vocabulary.of(np.arange(vocab, dtype=np.int32), vocab)
    found = measure(head, torch.zeros(vocab, 64), torch.eye(vocab), [s], vocabulary, drafts=3)
    assert found.by_position == by_position
    assert found.tokens_per_forward == pytest.approx(tokens_per_forward, abs=0.01)
    assert found.tokens == 10


def test_batches_hold_every_sequence_once_and_no_more_rows_than_allowed() -> None:
    lengths = np.random.default_rng(1).integers(1, 200, 500)
    plan = batch_plan(lengths, 512, seed=4)
    assert sorted(i for batch in plan for i in batch) == list(range(500))
    assert all(len(batch) * lengths[batch].max() <= 512 for batch in plan)
    again = batch_plan(lengths, 512, seed=4)
    assert all((a == b).all() for a, b in zip(plan, again, strict=True))


def test_held_out_prompts_have_other_topics() -> None:
    training, held_out = Prompts("training", seed=0), Prompts("held-out", seed=0)
    trained = {training[i].text for i in range(3000)}
    same = [i for i in range(300) if held_out[i].kind == "chat" and held_out[i].text in trained]
    assert len(same) < 15  # sums may repeat
    assert training[17] == Prompts("training", seed=0)[17] != Prompts("training", seed=1)[17]


def test_prompts_are_read_from_text_and_from_json_lines(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one\nline\n\ntwo\n\n\n")
    assert [p.text for p in read_prompts(text, "prose")] == ["one\nline", "two"]
    lines = tmp_path / "b.jsonl.gz"
    rows = [{"question": "q\u2028r"}, {"turns": ["first", "second"]}, {"prompt": "p"}]
    lines.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    assert [p.text for p in read_prompts(lines, "chat")] == ["q\u2028r", "first", "p"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.txt", b"", "holds no prompt"),
        ("a.txt", b"\xff\xfe\xfa", "not a readable text file"),
        ("a.jsonl", b'{"question": 3}', "line 1: expected an object with a text"),
        ("a.jsonl", b'{"question": "x"}\n{"turns": []}', "line 2: expected"),
        ("a.jsonl", b"[", "line 1: not JSON"),
        ("a.jsonl.gz", b"no gzip", "not a readable text file"),
    ],
)
def test_a_bad_prompt_file_is_named(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(PromptFileError, match=says):
        read_prompts(path, "chat")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--files", "1-x"], "1-x: expected numbers like"),
        (["--files", "3-1"], "3-1: names no number"),
        (["--ffn", "0"], "--ffn is 0, it must be above 0"),
        (["--chat", "half:x.txt"], "half:x.txt: expected SHARE"),
        (["--chat", "1.5:x.txt"], "1.5:x.txt: expected SHARE"),
        (["--prose", "0.5:missing.txt"], "missing.txt: not a readable text file"),
        (["--epochs", "nan"], "--epochs is nan, it must be above 0"),
        (["--hidden-weight", "-1"], "--hidden-weight is -1.0, it must be at least 0"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        train_mtp.main(["--out", str(tmp_path), *arguments])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ffn", "4096"], "an FFN of 4096 neurons, expected 1 to 128"),
        (["--prompt-tokens", "600"], "612 tokens, the model's limit is 512"),
    ],
)
def test_what_cannot_be_done_is_named(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    assert run(model, tmp_path / "out", *arguments) == 1
    assert says in capsys.readouterr().err


def test_a_folder_of_another_corpus_or_another_training_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(model, out) == 0
    assert run(model, out, "--seed", "1") == 1
    assert "holds text of another origin" in capsys.readouterr().err
    assert run(model, out, "--learning-rate", "1") == 1
    assert "belongs to other settings or data" in capsys.readouterr().err
    (out / "state.pt").write_bytes(b"no state")
    assert run(model, out) == 1
    assert "not a training state" in capsys.readouterr().err
    shard_path(out / "corpus", 1).write_bytes(b"no corpus")
    assert run(model, out) == 1
    assert "not a whole file of a corpus" in capsys.readouterr().err


def test_a_head_file_is_checked(model: Path, tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(model)
    path = tmp_path / "mtp.safetensors"
    ids = np.arange(20, dtype=np.int32)
    save_head(path, head_of(model), ids, {"steps": "0"})
    good = load_file(path)
    head, found = read_head(path, checkpoint)
    assert (found == ids).all()
    torch.testing.assert_close(head.norm.weight.half(), good["norm.weight"])

    def refused(says: str, **changes: torch.Tensor | None) -> None:
        changed = {k: v for k, v in (good | changes).items() if v is not None}
        save_file(changed, path)
        with pytest.raises(HeadFileError, match=says):
            read_head(path, checkpoint)

    refused(r"enorm.weight: expected F16 \[64\], found nothing", **{"enorm.weight": None})
    refused(r"found F16 \[63\]", **{"hnorm.weight": torch.zeros(63, dtype=torch.float16)})
    refused(r"found F32 \[64\]", **{"norm.weight": torch.zeros(64)})
    refused("mlp.gate_proj.weight: missing", **{"mlp.gate_proj.weight": None})
    refused("other: not a key of a head", other=torch.zeros(1))
    refused("draft_token_ids: expected I32", draft_token_ids=None)
    refused("ascending tokens below", draft_token_ids=torch.tensor([1, 1], dtype=torch.int32))
    refused("ascending tokens below", draft_token_ids=torch.tensor([9999], dtype=torch.int32))


def test_a_head_that_is_too_large_or_not_finite_is_not_written(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mtp.safetensors"
    head = head_of(model)
    with pytest.raises(HeadFileError, match="the limit is"):
        save_head(path, head, np.arange(2_500_000, dtype=np.int32), {})
    with torch.no_grad():
        head.norm.weight[3] = 1e9
    with pytest.raises(HeadFileError, match=r"norm.weight: a value is not finite in fp16"):
        save_head(path, head, np.arange(3, dtype=np.int32), {})
    assert not path.exists()


def test_another_models_state_is_no_state(tmp_path: Path) -> None:
    from headrace.mtp_training import loop

    path = tmp_path / "state.pt"
    torch.save({"step": 3}, path)
    with pytest.raises(StateError, match="not a training state"):
        loop._load_state(path, "x")


def test_a_corpus_that_lacks_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"00003\.safetensors: not a whole file"):
        read_corpus(tmp_path, [3])
