"""The server of the examples answers many at once as the network does, whatever else it is sent, and ends in order."""

import asyncio
import contextlib
import io
import re
import socket
import threading
import time

import pytest
import torch
import torchvision
import typer
from auxhead.model import Preprocessing, attach, save_checkpoint
from auxhead.model.examples import load_test, serve
from auxhead.model.network.learned_from import fingerprint
from PIL import Image
from torchvision.io import encode_png

httpx, uvicorn = pytest.importorskip("httpx"), pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.usefixtures("without_interpreter")


@contextlib.contextmanager
def serving(service, **options):
    """A server on a free port of loopback, in a thread; ends as a signal ends one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(serve.make_app(service), log_level="critical", **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
        finally:
            server.should_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive(), "the server does not end"


@pytest.fixture(scope="module")
def network():
    return serve.small_network("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def service(network):
    before = {tap: head.rule.threshold for tap, head in zip(network.taps, network.exit_heads, strict=True)}
    network.monitor.reset()
    yield serve.Service(network)
    network.set_rules(before)


def pictures(count):
    """PNG files, and their pixels uint8 [N, 3, 64, 64]."""
    pixels = torch.randint(256, (count, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    return [encode_png(each).numpy().tobytes() for each in pixels], pixels


def ask_at_once(url, bodies):
    async def ask():
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            return await asyncio.gather(*(http.post("/answer", content=body) for body in bodies))

    return asyncio.run(ask())


def bitmap(mode, size=(64, 64), form="TIFF"):
    file = io.BytesIO()
    Image.new(mode, size).save(file, form)
    return file.getvalue()


def test_each_client_gets_the_networks_own_answer_and_requests_are_gathered(service):
    files, pixels = pictures(20)
    images = service.preprocessing.normalised(pixels).to(service.network.device)
    wanted = [service.network(each[None]) for each in images]
    service.network.monitor.reset()
    with serving(service) as (url, _):
        found = [answer.json() for answer in ask_at_once(url, files)]
        counts = httpx.get(f"{url}/counts").json()
    assert [one["label"] for one in found] == [str(one.label.item()) for one in wanted]
    assert [one["exit_index"] for one in found] == [one.exit_index.item() for one in wanted]
    assert [one["confidence"] for one in found] == pytest.approx([one.confidence.item() for one in wanted], abs=1e-3)
    names = [*service.network.taps, "classifier"]
    assert all(one["exit"] == names[one["exit_index"]] for one in found) and len({one["exit"] for one in found}) > 1
    sizes = {int(size): count for size, count in counts["batches"].items()}
    assert sum(size * count for size, count in sizes.items()) == 20 and sum(sizes.values()) < 15
    assert 1 < max(sizes) <= serve.LARGEST
    assert counts["exits"] == {name: [one["exit"] for one in found].count(name) for name in names}
    assert service.network.monitor.counts().tolist() == [*counts["exits"].values()], "padding is not counted"
    assert counts["drift"] == []


def test_a_bad_picture_is_refused_alone(service, monkeypatch):
    monkeypatch.setattr(serve, "MOST_BYTES", 100_000)
    (good, *others), _ = pictures(6)
    bad = {
        b"no picture": (422, "format is not known"),
        b"": (422, "cannot be read as an image"),
        good[:200]: (422, "cannot be read as an image"),
        bitmap("F"): (422, "floats of 32 bits"),
        bitmap("1", (12_000, 12_000), "PNG"): (422, "12,000 x 12,000 pixels"),
        bytes(100_001): (413, "more than 100,000 bytes"),
    }
    with serving(service) as (url, _):
        alone = ask_at_once(url, [good])[0].json()
        found = ask_at_once(url, [body for pair in zip([good, *others], bad, strict=True) for body in pair])
        assert [answer.status_code for answer in found[::2]] == [200] * 6
        assert {**found[0].json(), "confidence": 0} == {**alone, "confidence": 0}
        for answer, (status, said) in zip(found[1::2], bad.values(), strict=True):
            assert answer.status_code == status and said in answer.json()["detail"], answer.text
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        assert sum(httpx.get(f"{url}/counts").json()["exits"].values()) == 7
        grey = ask_at_once(url, [bitmap("L"), bitmap("RGBA", form="PNG")])  # these become RGB, as in training
        assert [answer.status_code for answer in grey] == [200, 200]


def test_thresholds_change_while_it_runs(service):
    files, _ = pictures(8)
    with serving(service) as (url, _), httpx.Client(base_url=url) as http:
        before = http.put("/rules", json={}).json()
        assert {tap: rule["criterion"] for tap, rule in before.items()} == dict.fromkeys(before, "max_prob")
        for wrong, said in (
            ({"layer2": 0.5, "nosuch": 0.5}, "'nosuch' is not a tap"), ({"layer2": 0.5, "layer1": 1.5}, "got 1.5"),
            ({"layer2": "sure"}, "valid number"), ([0.5], "valid dictionary"),
        ):  # fmt: skip
            refused = http.put("/rules", json=wrong)
            assert refused.status_code == 422 and said in refused.text
        assert http.put("/rules", json={}).json() == before, "what is refused changes nothing"
        assert http.get("/counts").json()["drift"] == []

        now = http.put("/rules", json={"layer1": 1.0, "layer2": 0.0}).json()
        assert [rule["threshold"] for rule in now.values()] == [1.0, 0.0, before["layer3"]["threshold"]]
        assert {answer.json()["exit"] for answer in ask_at_once(url, files)} == {"layer2"}
        assert http.get("/counts").json()["drift"] is None, "of these rules nobody knows the shares"

        http.put("/rules", json={tap: rule["threshold"] for tap, rule in before.items()})
        assert http.get("/counts").json()["drift"] == []
    assert service.network.monitor.counts().sum() == 0, "what was counted under other rules is forgotten"


@pytest.mark.filterwarnings("ignore::auxhead.model.DriftWarning")
def test_drift_is_told(service):
    white = encode_png(torch.full((3, 64, 64), 255, dtype=torch.uint8)).numpy().tobytes()
    with serving(service) as (url, _):
        ask_at_once(url, [white] * 100)
        drifted = httpx.get(f"{url}/counts").json()["drift"]
    assert drifted and all(not one["low"] <= one["share"] <= one["high"] for one in drifted)


def test_what_was_accepted_is_answered_before_it_ends(service, monkeypatch):
    asked, original, closed = threading.Event(), service.answer, []

    def slowly(pixels):
        asked.set()
        time.sleep(0.3)
        return original(pixels)

    monkeypatch.setattr(service, "answer", slowly)
    monkeypatch.setattr(service.runner, "close", lambda: closed.append(sum(service.exits.values())))
    monkeypatch.setattr(serve, "LARGEST", 4)
    files, _ = pictures(12)
    with serving(service) as (url, server):
        found = []
        clients = threading.Thread(target=lambda: found.extend(ask_at_once(url, files)))
        clients.start()
        assert asked.wait(30)
        time.sleep(0.2)  # until all are accepted; the first batch of three is under way
        server.should_exit = True
        clients.join(30)
    assert [answer.status_code for answer in found] == [200] * 12
    assert closed == [12], "the runner is closed last"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_closing_waits_for_all_who_asked_but_those_who_have_gone(monkeypatch):
    def answer(pixels):
        time.sleep(0.05)
        return [] if len(pixels) == 1 else [10 * each.item() for each in pixels]

    async def ask_and_close():
        gatherer = serve.Gatherer(answer)
        asked = [asyncio.create_task(gatherer.ask(torch.tensor(number))) for number in range(5)]
        await asyncio.sleep(0.03)  # the first batch is under way
        asked[1].cancel()
        await asyncio.wait_for(gatherer.close(), 10)
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)

    monkeypatch.setattr(serve, "LARGEST", 2)
    first, gone, *others, last = asyncio.run(ask_and_close())
    assert isinstance(gone, asyncio.CancelledError) and [first, *others] == [0, 20, 30]
    assert isinstance(last, ValueError), "a batch with too few answers is one that failed"


def test_a_batch_that_fails_is_told_and_the_next_one_is_answered(service, monkeypatch):
    original, failures = service.answer, [RuntimeError("no memory")]
    monkeypatch.setattr(service, "answer", lambda pixels: raised(failures.pop()) if failures else original(pixels))

    def raised(error):
        raise error

    files, _ = pictures(1)
    with serving(service) as (url, _):
        assert ask_at_once(url, files)[0].status_code == 500
        ill = httpx.get(f"{url}/health")
        assert ill.status_code == 503 and "no memory" in ill.text
        assert ask_at_once(url, files)[0].status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


def test_one_thread_asks_the_runner_for_batches_of_the_largest_size_at_most(service, monkeypatch):
    asking, original = set(), type(service.runner).__call__

    def noted(runner, x):
        asking.add(threading.get_ident())
        return original(runner, x)

    monkeypatch.setattr(type(service.runner), "__call__", noted)
    monkeypatch.setattr(serve, "LARGEST", 2)
    files, _ = pictures(12)
    with serving(service) as (url, _):
        ask_at_once(url, files)
        assert "2" in (sizes := httpx.get(f"{url}/counts").json()["batches"]) and {*sizes} <= {"1", "2"}
    assert len(asking) == 1 and threading.get_ident() not in asking


def test_the_load_test_prints_a_table_of_80_columns(service, capsys):
    with serving(service) as (url, _):
        load_test.main(url, clients=6, seconds=0.5)
        first = capsys.readouterr().out
        load_test.main(url, clients=1, seconds=0.1)
        second = capsys.readouterr().out
        counts = httpx.get(f"{url}/counts").json()
    assert all(len(line) <= 80 for line in (first + second).splitlines()), first
    assert " requests a second, median " in first and " ms, p99 " in first
    asked = []
    for said in (first, second):
        rows = [line.split() for line in said.splitlines()[1:]]
        batches = [(int(size), int(count)) for what, _, _, size, count, _ in rows if what == "batches"]
        exits = [int(count) for what, _, _, _, count, _ in rows if what == "exits"]
        asked.append(sum(size * count for size, count in batches))
        assert asked[-1] == sum(exits) > 0
        assert (max(size for size, count in batches if count) > 1) == (said is first)
    assert sum(asked) == sum(counts["exits"].values())


def test_a_checkpoint_is_served_by_its_preprocessing_classes_and_calibration(network, tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: given.update(options, app=app))
    monkeypatch.setattr(serve, "make_app", lambda service: service)
    names = [f"kind{number}" for number in range(10)]
    rules = [[*head.rule.numbers] for head in network.exit_heads]
    its = {"rules": rules, "parameters": [*fingerprint(network)]}
    report = {"format": "x", **its, "exits": [{"share": 0.25}] * 4, "samples": {"test": 100}}
    save_checkpoint(tmp_path / "net", network, classes=names, calibration=report)
    made = "import torchvision\ndef make_backbone():\n    return torchvision.models.resnet18(num_classes=10)\n"
    (tmp_path / "its_backbone.py").write_text(made)
    monkeypatch.syspath_prepend(tmp_path)
    serve.main(str(tmp_path / "net"), "its_backbone:make_backbone", port=1)
    served = given["app"]
    assert served.names == tuple(names) and served.network.monitor.shares == (0.25,) * 4 and given["port"] == 1
    assert served.network.monitor.samples == 100 and "host" not in given, "loopback is uvicorn's default"


def test_a_checkpoint_of_a_backbone_by_name_is_served(tmp_path):
    torch.manual_seed(0)
    backbone = torchvision.models.resnet18(num_classes=3).eval()
    network = attach(backbone, ["layer2"], example_input=torch.randn(2, 3, 64, 64)).eval()
    network.preprocessing = Preprocessing(crop=64, resize=64)
    save_checkpoint(tmp_path / "saved", network, classes=["cat", "dog", "owl"])
    found = serve.saved_service(str(tmp_path / "saved"), "resnet18", "cpu")
    (answer,) = found.answer([torch.zeros(3, 64, 64, dtype=torch.uint8)])
    assert answer["label"] in ("cat", "dog", "owl") and answer["exit"] in ("layer2", "classifier")


def test_commands_say_in_a_line_what_is_wrong(tmp_path, capsys):
    with pytest.raises(SystemExit):
        _run(serve.main, "--checkpoint", str(tmp_path / "nosuch"))
    assert "nosuch" in re.sub(r"[\s│]", "", capsys.readouterr().err)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SystemExit):
        _run(load_test.main, "--url", f"http://127.0.0.1:{port}", "--seconds", "0.1")
    assert "doesnotanswer" in re.sub(r"[\s│]", "", capsys.readouterr().err)


def test_the_load_test_counts_to_the_last_answer_and_says_in_a_line_what_a_server_did(service, monkeypatch, capsys):
    answer, fails = service.answer, threading.Event()

    def slowly(pixels):
        time.sleep(0.4)
        return [] if fails.is_set() else answer(pixels)

    monkeypatch.setattr(service, "answer", slowly)
    with serving(service) as (url, _):
        load_test.main(url, clients=2, seconds=0.1)
        rate = float(re.search(r"clients: (\d+) requests a second", capsys.readouterr().out)[1])
        assert rate <= 5, "two answers in 0.4 seconds at least"
        fails.set()
        for words in (["--url", url], ["--url", url.removeprefix("http://")]):
            with pytest.raises(SystemExit):
                _run(load_test.main, *words, "--seconds", "0.1")
            assert "Invalidvalue:" in re.sub(r"[\s│]", "", capsys.readouterr().err)


def _run(command, *words):
    app = typer.Typer()
    app.command()(command)
    app([*words])
