"""The page's answers: filters against the slow way, decisions, pictures, escaping, and every refusal."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from _examples import made_up, slow_find, some_decisions
from _server import served
from _support import TinyRun
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from crosel import UserError
from crosel.report.html import png
from crosel.review import cards as load_module
from crosel.review import serve_review
from crosel.review.cards import KEYS, OUTSIDE_KEY, SIDE, STATES, Cards, Query, Queue, Sort, load_cards
from crosel.review.guard import MAX_BODY
from crosel.runs.labels import FLAGS

httpx = pytest.importorskip("httpx", reason="httpx is not installed, and the test client needs it")
pytest.importorskip("fastapi", reason="the extra 'review' is not installed")
with warnings.catch_warnings():  # newer versions would rather have another client
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient

from crosel.review.app import _InTime, build_app  # noqa: E402

BASE = "http://127.0.0.1:8123"
TOKEN = "secret-token"
NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(build_app(made_up(), tmp_path / "review.jsonl", TOKEN), base_url=BASE) as client:
        assert client.get("/", params={"token": TOKEN}).status_code == 200
        yield client


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(build_app(made_up(), tmp_path / "review.jsonl", TOKEN), base_url=BASE) as client:
        yield client


def cards_of(client: TestClient) -> Cards:
    cards: Cards = client.app.state.cards  # type: ignore[attr-defined]
    return cards


# --- filters ------------------------------------------------------------------------------------------------------

shares = st.integers(0, 20).map(lambda i: i / 20)
queries = st.builds(
    Query, st.sampled_from(get_args(Queue)), st.none() | st.integers(0, 11),
    st.sampled_from(["label", "candidates"]), st.none() | st.sampled_from(FLAGS),
    st.just(0.0) | shares, st.just(1.0) | shares, st.sampled_from(["", "1", "IMG/0", "07", "nowhere"]),
    st.sampled_from(STATES), st.sampled_from(get_args(Sort)), st.none() | st.integers(0, 149), st.none(),
    st.integers(1, 60),
)  # fmt: skip
EXAMPLES = made_up(150)
DECISIONS = some_decisions(EXAMPLES, 70)


@settings(max_examples=200)
@given(query=queries, backwards=st.booleans())
def test_filters_agree_with_the_slow_way(query: Query, backwards: bool) -> None:
    if backwards:
        query = Query(**{**vars(query), "after": None, "before": query.after})
    answer = EXAMPLES.find(query, DECISIONS)
    assert (answer.total, answer.start, answer.rows.tolist()) == slow_find(EXAMPLES, query, DECISIONS)


def test_filters_over_http(client: TestClient) -> None:
    cards = cards_of(client)
    decisions = client.app.state.log.decisions  # type: ignore[attr-defined]
    asked = {
        "queue": "labels",
        "label": 3,
        "within": "candidates",
        "flag": "none",
        "low": 0.1,
        "high": 0.9,
        "text": "img",
        "sort": "most",
    }
    answer = client.get("/api/examples", params=asked).json()
    query = Query("labels", 3, "candidates", "", 0.1, 0.9, "img", "all", "most")
    total, start, rows = slow_find(cards, query, decisions)
    assert (answer["total"], answer["start"], [e["row"] for e in answer["examples"]]) == (total, start, rows)


def test_pages_lead_through_all_examples_while_they_are_decided(client: TestClient) -> None:
    """What leaves the filter under the reviewer's hands must not make the next page leave something out."""
    seen: list[int] = []
    place: dict[str, Any] = {}
    while True:
        page = client.get("/api/examples", params={"state": "undecided", "limit": 17, **place}).json()["examples"]
        if not page:
            break
        for example in page:
            seen.append(example["row"])
            if example["row"] % 3:
                client.post("/api/decisions", json={"row": example["row"], "label": None})
        place = {"after": page[-1]["row"]}
    assert sorted(seen) == list(range(200))


@pytest.mark.parametrize(
    "bad",
    [
        "label=99", "label=-1", "label=x", "within=x", "flag=x", "low=2", "low=nan", "high=-1", "state=x", "sort=x",
        "queue=x", "limit=0", "limit=61", "after=-1", "after=x", "text=" + "a" * 201, "after=99999999999",
    ],
)  # fmt: skip
def test_bad_filters_are_refused(client: TestClient, bad: str) -> None:
    assert client.get(f"/api/examples?{bad}").status_code == 422


# --- cards --------------------------------------------------------------------------------------------------------


def test_cards_say_what_the_run_folder_says(client: TestClient) -> None:
    cards = cards_of(client)
    assert cards.result.probabilities is not None
    for card in client.get("/api/examples", params={"sort": "row", "limit": 60}).json()["examples"]:
        row = card["row"]
        inside = set(np.flatnonzero(cards.examples.candidates[row]).tolist())
        shown = [c["label"] for c in card["candidates"]]
        assert shown[0] == card["label"] == cards.result.labels[row]
        assert set(shown) <= inside
        assert len(shown) + card["more"] == len(inside)
        assert [c["key"] for c in card["candidates"]] == list(KEYS[: len(shown)])
        assert all(c["p"] == pytest.approx(float(cards.result.probabilities[row, c["label"]]), abs=1e-4)
                   for c in card["candidates"])  # fmt: skip
        top = int(cards.result.probabilities[row].argmax())
        assert ("outside" in card) == (top not in inside)
        if "outside" in card:
            assert card["outside"]["key"] == OUTSIDE_KEY
        said = cards.result.networks
        assert said is not None
        assert said.past_labels is not None
        assert [n["selected"] for n in card["networks"]] == said.selected[:, row].tolist()
        assert [n["past"] for n in card["networks"]] == said.past_labels[:, :, row].tolist()
        order = client.get(f"/api/classes/{row}").json()
        assert sorted(o["label"] for o in order) == list(range(12))
        assert [o["inside"] for o in order] == sorted(o["inside"] for o in order)


def test_few_classes_have_keys_of_their_own() -> None:
    digits = made_up(20, 10, classes=tuple("0123456789"))
    assert all(c["key"] == str(c["label"]) for row in range(20) for c in digits.card(row)["candidates"])
    animals = made_up(20, 3, classes=("cat", "dog", "cow"))
    assert all(c["key"] == "123"[c["label"]] for row in range(20) for c in animals.card(row)["candidates"])
    many = made_up(5, 300, candidates=np.ones((5, 300), bool), probabilities=None)
    card = many.card(0)
    assert (len(card["candidates"]), card["more"]) == (8, 292)
    assert [c["p"] is None for c in card["candidates"]] == [False] + [True] * 7  # only the run's own label's is known


def test_features_instead_of_pictures(tmp_path: Path) -> None:
    columns = ("<b>length</b>", *map(str, range(9)))
    cards = made_up(20, x=np.arange(200, dtype=np.float32).reshape(20, 10), columns=columns)
    with TestClient(build_app(cards, tmp_path / "log", TOKEN), base_url=BASE) as client:
        client.headers["x-crosel-token"] = TOKEN
        assert client.get("/api/run").json()["images"] is False
        assert client.get("/api/run").json()["columns"] == list(columns[:6])
        assert client.get("/image/0.png").status_code == 404
        card = client.get("/api/examples?sort=row").json()["examples"][1]
        assert card["features"] == ["10", "11", "12", "13", "14", "15"]
        assert card["features_more"] == 4


def test_pictures_are_png_and_may_be_cached(client: TestClient) -> None:
    answer = client.get("/image/7.png?v=v1")
    assert answer.headers["content-type"] == "image/png"
    assert "max-age" in answer.headers["cache-control"]
    pixels = np.asarray(Image.open(io.BytesIO(answer.content))).transpose(2, 0, 1)
    x = cards_of(client).x
    assert x is not None
    assert np.array_equal(pixels, x[7])
    assert client.get("/image/200.png").status_code == 404


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 128, 128), (3, 300, 200), (1, 5000, 3), (3, 2, 900), (3, 129, 129)])
def test_large_pictures_are_reduced(shape: tuple[int, ...]) -> None:
    small = np.asarray(Image.open(io.BytesIO(png(np.full(shape, 200, np.uint8), SIDE))))
    assert max(small.shape[:2]) <= 128
    assert min(small.shape[:2]) >= 1
    assert (small == 200).all()


# --- decisions ----------------------------------------------------------------------------------------------------


def test_decisions_are_named_by_the_label_and_survive(client: TestClient, tmp_path: Path) -> None:
    cards = cards_of(client)
    sizes = cards.examples.candidates.sum(axis=1)
    row = int(np.flatnonzero((sizes > 1) & (sizes < 12))[0])
    label = int(cards.result.labels[row])
    other = next(int(j) for j in np.flatnonzero(cards.examples.candidates[row]) if j != label)
    outside = int(np.flatnonzero(~cards.examples.candidates[row])[0])
    for value, name in ((label, "accept"), (other, "choose"), (outside, "outside"), (None, "skip")):
        answer = client.post("/api/decisions", json={"row": row, "label": value}).json()
        assert answer["decided"] == {"decision": name, "label": -1 if value is None else value}
        assert answer["progress"][name] == answer["progress"]["done"] == 1
        last = json.loads((tmp_path / "review.jsonl").read_text().splitlines()[-1])
        assert (last["decision"], last["row"], last["id"]) == (name, row, cards.ids[row])
    answer = client.post("/api/undo").json()
    assert (answer["row"], answer["decided"]["decision"], answer["example"]["row"]) == (row, "outside", row)
    for _ in range(3):
        answer = client.post("/api/undo").json()
    assert (answer["row"], answer["decided"], answer["progress"]["done"]) == (row, None, 0)
    assert client.post("/api/undo").json()["row"] is None


def test_export_over_http(client: TestClient) -> None:
    client.post("/api/decisions", json={"row": 4, "label": 2})
    answer = client.get("/corrections.csv")
    assert "attachment" in answer.headers["content-disposition"]
    assert answer.text.splitlines()[1].startswith(cards_of(client).ids[4] + ",class 2,")


@pytest.mark.parametrize(
    "body",
    [
        {}, [], {"row": 0}, {"row": -1, "label": 0}, {"row": 200, "label": 0}, {"row": 0, "label": 12},
        {"row": 0, "label": -1}, {"row": "0", "label": 0}, {"row": True, "label": 0}, {"row": 0, "label": 0, "x": 1},
        {"row": 0, "label": 1.5}, {"row": 10**30, "label": None},
    ],
)  # fmt: skip
def test_bad_decisions_are_refused_and_leave_no_line(client: TestClient, tmp_path: Path, body: Any) -> None:
    assert client.post("/api/decisions", json=body).status_code in (404, 422)
    assert (tmp_path / "review.jsonl").read_bytes() == b""


def test_what_could_not_be_saved_is_told(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    client.post("/api/decisions", json={"row": 0, "label": None})
    monkeypatch.setattr("crosel.runs.corrections.os.write", full)
    for path, body in (("/api/decisions", {"row": 1, "label": None}), ("/api/undo", {})):
        answer = client.post(path, json=body)
        assert answer.status_code == 507
        assert "not saved: " in answer.json()["detail"]
    assert client.get("/api/run").json()["progress"]["done"] == 1


# --- refusals -----------------------------------------------------------------------------------------------------


def test_nothing_without_the_token(stranger: TestClient) -> None:
    for path in ("/", "/?token=", "/?token=wrong", "/api/run", "/api/run?token=" + TOKEN, "/image/0.png",
                 "/static/page.js", "/corrections.csv", "/nothing", "/favicon.ico"):  # fmt: skip
        answer = stranger.get(path)
        assert answer.status_code == 403, path
        assert TOKEN not in answer.text
        assert "set-cookie" not in answer.headers
    assert stranger.post("/api/decisions", json={"row": 0, "label": None}).status_code == 403
    for cookie in ("crosel_review_8123=wrong", "crosel_review_1=" + TOKEN, "crosel_review_8123=é", ";;=;"):
        assert stranger.get("/api/run", headers={"cookie": cookie.encode()}).status_code == 403


def test_the_cookie_is_closed_to_scripts_and_other_sites(stranger: TestClient) -> None:
    cookie = stranger.get("/", params={"token": TOKEN}).headers["set-cookie"]
    assert cookie == f"crosel_review_8123={TOKEN}; Path=/; HttpOnly; SameSite=Strict"
    assert stranger.get("/api/run").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"}, {"host": "evil.example:8123"}, {"host": "127.0.0.1.evil.example:8123"}, {"host": ""},
        {"host": "127.0.0.1:8123@evil.example"}, {"host": "127.0.0.1:x"}, {"host": "0.0.0.0:8123"},
        {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://127.0.0.1:8123"}, {"origin": "http://localhost:8123"},
        {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"},
    ],
)  # fmt: skip
def test_foreign_hosts_and_origins_are_refused(client: TestClient, tmp_path: Path, headers: dict[str, str]) -> None:
    headers = {**headers, "x-crosel-token": TOKEN}
    assert client.get("/api/run", headers=headers).status_code == 403
    assert client.post("/api/decisions", json={"row": 0, "label": None}, headers=headers).status_code == 403
    assert (tmp_path / "review.jsonl").read_bytes() == b""


def test_the_page_itself_may_be_reached_by_a_link(stranger: TestClient) -> None:
    assert stranger.get("/", params={"token": TOKEN}, headers={"sec-fetch-site": "cross-site"}).status_code == 200
    own = {"origin": BASE, "sec-fetch-site": "same-origin"}
    assert stranger.post("/api/undo", headers=own).status_code == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_other_methods_are_refused(client: TestClient, method: str) -> None:
    for path in ("/", "/api/run", "/api/decisions"):
        assert client.request(method, path).status_code == 405
    assert client.get("/api/decisions").status_code == 405
    assert client.post("/api/run").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/..%2f..%2fstore.py", "/static/%2e%2e/store.py", "/static/page.js%00", "/static/..\\store.py",
        "/static//etc/passwd", "//etc/passwd", "/image/%31.png", "/image/-1.png", "/image/1.5.png", "/image/x.png",
        "/static/store.py", "/review.jsonl", "/docs", "/openapi.json", "/static/", "/static", "/api/run/",
        "/" + "a" * 300, "/?x=" + "a" * 3000, "/image/99999999999999999999.png",
    ],
)  # fmt: skip
def test_path_tricks_are_refused(client: TestClient, path: str) -> None:
    answer = client.get(httpx.URL(BASE).copy_with(raw_path=path.encode()))
    assert answer.status_code in (400, 404, 414, 422)


def test_large_bodies_are_refused(client: TestClient, tmp_path: Path) -> None:
    for body in (b"x" * (MAX_BODY + 1), (b"x" * 1000 for _ in range(10))):  # with a length, and in chunks
        answer = client.post("/api/decisions", content=body)
        assert answer.status_code == 413
    assert client.post("/api/undo", content=b"", headers={"content-length": "-1"}).status_code == 400
    assert client.post("/api/undo", content=b"", headers={"content-length": "9" * 30}).status_code == 413
    assert (tmp_path / "review.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    "body", ['{"row": NaN, "label": 0}', '{"row": 0, "label": Infinity}', '{"row": -Infinity}', "NaN"]
)
def test_numbers_that_are_no_json_are_refused(client: TestClient, tmp_path: Path, body: str) -> None:
    """The answer used to repeat the value, which no JSON can."""
    answer = client.post("/api/decisions", content=body.encode(), headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert "detail" in answer.json()
    assert (tmp_path / "review.jsonl").read_bytes() == b""


HALF = {
    "headers": "GET / HTTP/1.1\r\nHost: 127.0.0.1",
    "body": "POST /api/undo HTTP/1.1\r\nHost: 127.0.0.1\r\nx-crosel-token: token\r\nContent-Length: 9\r\n\r\nabc",
}


@pytest.mark.parametrize("begun", HALF)
def test_half_sent_requests_do_not_hold_the_page(begun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosel.review.app.REQUEST_SECONDS", 1.0)
    with served(made_up(), tmp_path / "review.jsonl", http=_InTime, limit_concurrency=16) as address:
        port = int(address.split(":")[2].split("/")[0])
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(16)]
        for each in held:
            each.sendall(HALF[begun].encode())
        time.sleep(0.3)
        if begun == "headers":  # the others have had an answer already
            assert httpx.get(address).status_code == 503, "all places are taken"
        for each in held:
            each.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                while each.recv(1000):  # until it is closed there
                    pass
            each.close()
        assert httpx.get(address).status_code == 200


def test_every_answer_forbids_content_from_elsewhere(client: TestClient) -> None:
    for path in ("/", "/api/run", "/nothing", "/static/page.js", "/image/0.png", "/static/..", "/api/examples?low=x"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers


def test_web_sockets_are_closed(client: TestClient) -> None:
    from starlette.websockets import WebSocketDisconnect

    opened = False
    with pytest.raises(WebSocketDisconnect) as closed, client.websocket_connect("/?token=" + TOKEN):
        opened = True
    assert not opened
    assert closed.value.code == 1008


def test_names_are_sent_as_data_and_shown_as_text(tmp_path: Path) -> None:
    cards = made_up(20, classes=(NASTY, *(f"c{j}" for j in range(11))), given_ids=[NASTY + str(i) for i in range(20)])
    with TestClient(build_app(cards, tmp_path / "log", TOKEN), base_url=BASE) as client:
        assert NASTY not in client.get("/", params={"token": TOKEN}).text
        for path in ("/api/run", "/api/examples"):
            answer = client.get(path)
            assert NASTY in answer.text
            assert answer.headers["content-type"] == "application/json"  # never HTML


def test_the_page_holds_no_inline_code_and_nothing_from_elsewhere() -> None:
    folder = resources.files("crosel.review")
    page, script, style = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "js", "css"))
    assert not re.search(r"\son\w+=|style=|javascript:|<script(?! src=)", page)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|setAttribute\(\"(on|style)", script
    )
    for text in (page, script, style):
        assert not re.search(r"https?://|@import|url\(", text)


# --- reading a run ------------------------------------------------------------------------------------------------


def test_a_real_run(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run.path, run)
    with TestClient(build_app(load_cards(run), run / "review.jsonl", TOKEN), base_url=BASE) as client:
        client.get("/", params={"token": TOKEN})
        cards = cards_of(client)
        assert (cards.n, cards.has_images, cards.notes) == (96, True, [])
        assert cards.result.probabilities is not None
        assert cards.result.networks is not None
        given = cards.result.probabilities[np.arange(96), cards.result.labels]
        assert np.allclose(given, cards.result.confidence, atol=2e-3)
        client.post("/api/decisions", json={"row": 1, "label": None})
    (run / "labels.csv").unlink()
    with pytest.raises(UserError, match=r"no labels\.csv yet"):
        load_cards(run)


def test_a_run_without_its_data_checkpoint_or_selection(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run.path, run)
    monkeypatch.setattr(load_module, "SECONDS", -1.0)
    saved_in_run = load_cards(run)
    assert saved_in_run.result.probabilities is not None
    (run / "predictions.npz").unlink()
    config = (run / "config.yaml").read_text()
    batch = re.sub(r"eval_batch_size: \d+", "eval_batch_size: 10", config)
    (run / "config.yaml").write_text(batch)
    slow = load_cards(run)  # would take longer than the start may
    assert slow.result.probabilities is None
    assert "crosel labels" in slow.notes[0]
    saved = {"pred_probs": np.full(slow.examples.candidates.shape, 0.1), "candidates": slow.examples.candidates}
    np.savez(run / "labels.npz", **saved)
    kept = load_cards(run)
    assert kept.result.probabilities is not None
    assert float(kept.result.probabilities[0, 0]) == pytest.approx(0.1, abs=1e-3)
    (run / "labels.npz").write_bytes(b"not an archive")
    shutil.rmtree(run / "checkpoints")
    (run / "selection.npz").write_bytes(b"")
    poor = load_cards(run)
    assert poor.result.probabilities is None
    assert poor.result.networks is None
    assert poor.has_images
    (run / "config.yaml").write_text(batch.replace("images.npz", "gone.npz"))
    assert load_cards(run).x is None
    card = load_cards(run).card(0)
    assert sum(c["p"] is not None for c in card["candidates"]) == 1


def test_a_port_that_is_taken_and_ports_that_are_none(tiny_run: TinyRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="is not available"):
        serve_review(tiny_run.path, taken.getsockname()[1], open_browser=False)
    with pytest.raises(UserError, match="a port is a number"):
        serve_review(tiny_run.path, 70000, open_browser=False)


def test_answers_are_sent_at_once() -> None:
    """Without TCP_NODELAY every answer would wait 40 ms; asyncio sets it only where the protocol is named."""
    from crosel.review.app import listen

    with listen(0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
            assert accepted.getsockname()[0] == "127.0.0.1"


def test_without_the_extra_the_remedy_is_told(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(UserError, match=r"pip install 'crosel\[review\]'"):
        serve_review(tiny_run.path, open_browser=False)


def test_eight_at_once_over_a_real_socket(tmp_path: Path) -> None:
    """No error, no lost line; the figures are the business of benchmarks/review_load.py."""
    cards = made_up(2000)
    failed: list[str] = []

    def work(number: int, port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"x-crosel-token": "token", "content-type": "application/json"}
        for i in range(12):
            row = number * 100 + i
            for method, path, body in (
                ("GET", f"/api/examples?after={row}&state=undecided", None), ("GET", f"/image/{row}.png", None),
                ("POST", "/api/decisions", json.dumps({"row": row, "label": i % 12})),
            ):  # fmt: skip
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    failed.append(f"{path}: {answer.status}")
        connection.close()

    with served(cards, tmp_path / "review.jsonl") as address:
        port = int(address.split(":")[2].split("/")[0])
        threads = [threading.Thread(target=work, args=(number, port)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
    rows = sorted(json.loads(line)["row"] for line in (tmp_path / "review.jsonl").read_text().splitlines())
    assert rows == [number * 100 + i for number in range(8) for i in range(12)]
