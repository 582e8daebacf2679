"""The command line, whole: a real gRPC server answers, the table is printed, the JSON saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from benchmarks.load import main, parse_arguments
from benchmarks.options import BenchOptions
from headrace.v1 import inference_pb2 as pb
from headrace.v1 import inference_pb2_grpc


class Counter(inference_pb2_grpc.InferenceServicer):
    """Answers each call with the tokens it asked for, one delta each, as long as it has answers left."""

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.answers = 1_000

    def ListModels(self, request, context):
        return pb.ListModelsResponse(models=[pb.Model(id="counter")])

    def Generate(self, request, context):
        self.prompts.append(len(request.token_ids.ids))
        if len(self.prompts) > self.answers:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more")
        for index in range(request.sampling.max_tokens):
            yield pb.GenerateEvent(delta=pb.Delta(first_index=index, token_ids=[index]))
        yield pb.GenerateEvent(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH))


@pytest.fixture
def counter() -> Iterator[tuple[Counter, str]]:
    servicer = Counter()
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait(10)


LOAD = ["--requests", "6", "--input-tokens", "uniform:3:9", "--output-tokens", "5", "--slo-ttft-ms", "60000"]


@pytest.mark.parametrize("pattern", [["--concurrency", "2"], ["--rate", "200"]], ids=["closed", "open"])
def test_a_run_from_end_to_end(counter, pattern: list[str], tmp_path: Path, capsys) -> None:
    servicer, target = counter
    code = main(["--target", target, *LOAD, *pattern, "--save-dir", str(tmp_path), "--label", "x"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    for shown in ("TTFT", "ITL", "TPOT", "E2E", "6 of 6 answered", "goodput", "(30 in ", "saved "):
        assert shown in printed
    [path] = tmp_path.glob("*-x.json")
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert (saved["completed"], saved["output_tokens"], saved["met_slo"], saved["model"]) == (6, 30, 6, "counter")
    assert saved["input_tokens"] == sum(servicer.prompts[1:])  # all but the warm-up
    assert saved["host"]["cores"] >= 1
    assert saved["host"]["packages"]["grpcio"]
    assert len(servicer.prompts) == 7


def test_prints_one_line_of_json_when_asked(counter, tmp_path: Path, capsys) -> None:
    _, target = counter
    assert main(["--target", target, *LOAD, "--save-dir", str(tmp_path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["output_tokens"] == 30
    assert "records" not in figures
    saved = json.loads(Path(figures.pop("saved")).read_text(encoding="utf-8"))
    assert len(saved.pop("records")) == 6
    assert figures == saved


def test_calls_without_their_answer_make_the_exit_code_one(counter, capsys) -> None:
    servicer, target = counter
    servicer.answers = 3  # the warm-up and two more
    assert main(["--target", target, "--requests", "5", "--output-tokens", "5", "--save-dir", ""]) == 1
    printed = capsys.readouterr().out
    assert "2 of 5 answered" in printed
    assert "3 x grpc_resource_exhausted" in printed
    assert "no more" in printed


def test_a_warm_up_without_its_answer_is_one_line(counter, capsys) -> None:
    servicer, target = counter
    servicer.answers = 0
    assert main(["--target", target]) == 2
    expected = f"bench: the warm-up call to {target} failed, grpc_resource_exhausted: no more\n"
    assert capsys.readouterr().err == expected


def test_nobody_there_is_one_line(tmp_path: Path, capsys) -> None:
    assert main(["--target", "127.0.0.1:9", "--save-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: cannot reach 127.0.0.1:9: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_options_that_cannot_be_are_one_line(capsys) -> None:
    assert main(["--preset", "huge"]) == 2
    assert (
        capsys.readouterr().err == "bench: --preset 'huge' is unknown; there are decode32, mixed64, prefill, single\n"
    )


def test_every_flag_reaches_its_option() -> None:
    assert parse_arguments([]) == (BenchOptions(), False)
    line = (
        "--api http --target http://x --model m --requests 3 --rate 2.5 --trace t --time-scale 0.5 --max-context 9 "
        "--vocab-size 5000 --seed 4 --slo-ttft-ms 1 --slo-tpot-ms 2 --timeout-s 3 --save-dir d --label l --json"
    )
    options, as_json = parse_arguments(line.split())
    assert as_json
    assert options == BenchOptions(
        api="http", target="http://x", model="m", requests=3, rate_per_s=2.5, trace="t", time_scale=0.5,
        max_context_tokens=9, vocab_size=5_000, seed=4, slo_ttft_ms=1.0, slo_tpot_ms=2.0, timeout_s=3.0, save_dir="d",
        label="l",
    )  # fmt: skip
    words = ["--preset", "single", "--concurrency", "2", "--input-tokens", "7", "--output-tokens", "mixed"]
    options, as_json = parse_arguments(words)
    assert not as_json
    assert options == BenchOptions(preset="single", concurrency=2, input_tokens="7", output_tokens="mixed")
