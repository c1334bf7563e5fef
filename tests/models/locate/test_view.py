"""`fairhead view`: heads tried out on a page that a server on this machine answers."""

import csv
import http.client
import json
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from browsing import chromium, opened_page, violations
from families import VIT
from PIL import Image

from fairhead.cli import main
from fairhead.cli.locate import _asked
from fairhead.locate.live import Live, serve
from fairhead.locate.session import open_question
from fairhead.locate.studies import layer_matched

HEADS = [[0, 1], [1, 0]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of locate on a random classifier of noise that is brighter for one sex."""
    folder = tmp_path_factory.mktemp("view")
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    model = hf.ViTForImageClassification(hf.ViTConfig(**VIT, num_labels=2)).eval()
    size = {"height": model.config.image_size, "width": model.config.image_size}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(4.0)
    model.config.id2label, model.config.label2id = {0: "no", 1: "yes"}, {"no": 0, "yes": 1}
    model.save_pretrained(folder / "model")
    hf.ViTImageProcessorPil(size=size, do_resize=True).save_pretrained(folder / "model")
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "smiling", "sex", "split"])
        for i in range(120):
            pixels = rng.normal(90 + 80 * (i % 2), 40, size=(*size.values(), 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
            rows.writerow(
                [f"{i}.png", ("no", "yes")[int(rng.integers(2))], ("f", "m")[i % 2], "train" if i < 8 else "test"]
            )
    arguments = ["--model", str(folder / "model"), "--data", f"images:{folder / 'labels.csv'}", "--label", "smiling"]
    arguments += ["--group", "sex", "--n-boot", "100", "--draws", "5", "--rank", "gap"]
    main(["locate", *arguments, "--out", str(folder / "run"), "--features", str(folder / "features")])
    return folder / "run", arguments


@pytest.fixture(scope="module")
def live(run):
    asked = _asked(run[0])
    return Live(open_question(asked.source, replace(asked.plan, forward=True), asked.features), asked.plan, run[0])


@pytest.fixture(scope="module")
def server(live):
    opened = serve(live, "Heads <b>")
    threading.Thread(target=opened.serve_forever, daemon=True).start()
    yield opened
    opened.shutdown()
    opened.server_close()


def ask(server, what, question, status=200, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    body = question if isinstance(question, str) else json.dumps(question)
    connection.request("POST", what, body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    assert answer.status == status
    return json.loads(answer.read())


def at(server, name):
    return f"/{server.token}/{name}"


def test_an_edit_is_answered_by_its_direct_effect_beside_random_heads(live):
    question = live.question
    heads = [tuple(head) for head in HEADS]
    sets = layer_matched(heads, question.shape[1], draws=40, seed=live.plan.seed).sets
    expected = question.rows.take(question.reported).figures(question.direct("mean", 0)([(), heads, *sets]))
    answer = live.edit(HEADS, "mean")
    assert answer["controls"] == len(sets)
    found = {one["metric"]: one for one in answer["figures"]}
    assert set(found) == set(live.shown)
    for metric, one in found.items():
        wanted = expected[metric]
        assert [one["before"], one["after"]] == pytest.approx(wanted[:2], nan_ok=True)
        known = wanted[2:][~np.isnan(wanted[2:])]
        assert one["controls"] == (None if not len(known) else pytest.approx(np.quantile(known, (0.05, 0.95))))
    assert all(one["before"] == one["after"] for one in live.edit([], "mean")["figures"])


def test_what_is_proved_is_what_ablate_reports(live, run, capsys):
    main(["ablate", *[a for a in run[1] if a not in ("--rank", "gap")], "--heads", "L0H1,L1H0", "--json", "-"])
    effects = json.loads(capsys.readouterr().out)["effects"]
    (reported,) = (e for e in effects if (e["kind"], e["way"]) == ("mean", "forward"))
    wanted = {m["metric"]: m for m in reported["metrics"]}
    proved = {one["metric"]: one for one in live.prove(HEADS, "mean")["figures"]}
    for metric in ("accuracy", "DP", "EOd", "evidence_gap"):
        one, other = proved[metric], wanted[metric]
        figures = [one[name] for name in ("before", "after", "value", "low", "high")]
        assert figures == pytest.approx([other[name] for name in ("before", "after", "effect", "low", "high")])


def test_what_is_saved_is_the_edit_and_nothing_is_replaced(server, live, run):
    asked = {"heads": HEADS, "kind": "project@0.5", "name": "edited"}
    folder = ask(server, at(server, "save"), asked)["folder"]
    told = live.question.forward(live.question.reported, "project@0.5")([[tuple(head) for head in HEADS]])[0]
    saved = live.question.of_saved(run[0] / "edited")
    np.testing.assert_allclose(saved.forward(saved.reported, "mean")([()])[0], told, atol=1e-4)
    assert folder == str(run[0] / "edited")
    assert "there already" in ask(server, at(server, "save"), asked, 400)["error"]
    for name in ("../other", "", "a/b", ".hidden", 3):
        assert "no name" in ask(server, at(server, "save"), {**asked, "name": name}, 400)["error"]


def test_only_its_own_page_may_ask(server):
    question = {"heads": HEADS, "kind": "mean"}
    assert ask(server, at(server, "edit"), question)["controls"] > 0
    assert "token" in ask(server, "/wrong/edit", question, 403)["error"]
    ask(server, at(server, "edit"), question, 403, Host="evil.example")  # a name that leads here
    ask(server, at(server, "edit"), question, 403, Origin="http://evil.example")
    ask(server, at(server, "edit"), question, 403, Origin="null")
    own = f"http://127.0.0.1:{server.server_port}"
    assert ask(server, at(server, "edit"), question, Origin=own)["heads"] == ["L0H1", "L1H0"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{server.address}../../etc/passwd")
    with urllib.request.urlopen(server.address) as answer:
        page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy
    assert "Heads &lt;b&gt;" in page


@pytest.mark.parametrize(
    ("what", "question", "message"),
    [
        ("edit", "{", "Expecting"),
        ("edit", "[" * 60_000, "maximum recursion depth"),
        ("edit", {"heads": [[9, 0]], "kind": "mean"}, "no head L9H0"),
        ("edit", {"heads": [[0]], "kind": "mean"}, "is no head"),
        ("edit", {"heads": [["0", 1]], "kind": "mean"}, "is no head"),
        ("edit", {"heads": HEADS, "kind": "erase"}, "mean, zero"),
        ("edit", {"heads": HEADS, "kind": "mean@x"}, "strength"),
        ("edit", {"heads": HEADS}, "expected heads, kind"),
        ("prove", {"heads": [], "kind": "mean"}, "no head is chosen"),
    ],
)
def test_what_cannot_be_answered_is_said(server, what, question, message):
    assert message in ask(server, at(server, what), question, 400)["error"]
    ask(server, at(server, "other"), question, 404)


def test_the_command_says_what_is_wrong_in_one_line(run, server, capsys, tmp_path):
    def refused(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["view", *map(str, arguments)])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert said.count("\n") == 1
        return said

    assert "is not a run of fairhead locate" in refused(tmp_path)
    (tmp_path / "headmap.json").write_text('{"provenance": {"command": "rm -rf /"}, "selected": []}')
    assert "view needs a run of fairhead locate" in refused(tmp_path)
    assert "cannot be used" in refused(run[0], "--port", server.server_port, "--no-browser").splitlines()[-1]


def test_the_page_in_a_browser(server, run):
    with chromium() as browser, opened_page(browser, server.address) as page:
        page.get_by_role("button", name="L0H1,").click()
        page.get_by_text("Direct effect of L0H1").wait_for()
        page.get_by_role("button", name="Prove").click()
        page.get_by_text("Proved.").wait_for()
        assert page.locator("#proved tbody tr").count() > 1
        accuracy = page.get_by_role("row", name="Accuracy, %").last.inner_text().split("\t")
        assert all(1 < float(value) <= 100 for value in accuracy[1:3])
        page.get_by_label("Name").fill("from-the-page")
        page.get_by_role("button", name="Save as a model").click()
        page.get_by_text("Saved:").wait_for()
        assert (run[0] / "from-the-page" / "model.safetensors").is_file()
        assert not violations(page)
        assert not violations(page, scheme="dark")
