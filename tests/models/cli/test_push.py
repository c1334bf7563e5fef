"""`fairhead push`, against a stand-in for the hub on this machine."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import ModelCard
from made_vit import vit

from fairhead.errors import FairheadError, InputError
from fairhead.models import save
from fairhead.report.model_card import Card, push
from fairhead.stats import Estimate


class Hub(BaseHTTPRequestHandler):
    """Takes what a token may write, and keeps it."""

    def do_POST(self):
        body = self.body()
        if self.headers.get("Authorization") != "Bearer right":
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            return self.answer({"url": f"http://127.0.0.1:{self.server.server_port}/me/faces"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
            return self.answer({"files": modes})
        lines = [json.loads(line) for line in body.splitlines()]
        sent = [line["value"] for line in lines if line["key"] == "file"]
        self.server.files = {file["path"]: base64.b64decode(file["content"]) for file in sent}
        here = f"http://127.0.0.1:{self.server.server_port}/me/faces"
        return self.answer({"commitUrl": f"{here}/commit/1", "commitOid": "1", "hookOutput": ""})

    def body(self):
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):  # in chunks
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self):
        self.answer({"id": "me/faces", "sha": "1", "siblings": []})

    def answer(self, content, code=200):
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "right")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def model(tmp_path):
    gap = Estimate("EOd", "sex", 0.12, 0.08, 0.16, 900, ideal=0.0)
    card = Card("Faces", "Trained.", ["A gap."], "images:faces.csv", estimates=[gap])
    save(vit(), tmp_path / "model", card.write)
    (tmp_path / "model" / "records.csv").write_text("id,label\n")
    return tmp_path / "model"


def test_a_model_and_its_card_are_uploaded_and_nothing_else(hub, model):
    before = (model / "README.md").read_text()
    push(model, "me/faces", private=True)
    assert hub.created["name"] == "faces"
    assert sorted(hub.files) == ["README.md", "config.json", "model.safetensors"]
    assert hub.files["model.safetensors"] == (model / "model.safetensors").read_bytes()
    sent = hub.files["README.md"].decode()
    card = ModelCard(sent)
    assert (card.data.model_name, card.data.eval_results[0].metric_value) == ("me/faces", 0.12)
    assert 'fairhead.load("hub:me/faces")' in sent
    assert (model / "README.md").read_text() == before


def test_what_goes_wrong_is_one_line(hub, model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(FairheadError, match="this token has no write access to me/faces") as refused:
        push(model, "me/faces")
    assert "wrong" not in str(refused.value)
    with pytest.raises(InputError, match="is not a hub name"):
        push(model, "a name with blanks")
    (model / "README.md").unlink()
    with pytest.raises(InputError, match=r"has no README\.md"):
        push(model, "me/faces")
    with pytest.raises(InputError, match=r"a folder with a model \(config\.json\)"):
        push(tmp_path, "me/faces")


def test_a_hub_that_does_not_answer_is_told(model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "right")
    with pytest.raises(FairheadError, match="does not answer"):
        push(model, "me/faces")
