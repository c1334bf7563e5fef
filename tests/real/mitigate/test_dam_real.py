"""DAM on pretrained encoders: its loss has the slope that autograd says, and it comes back from disk."""

import pytest
import torch
import transformers as hf

from fairhead.mitigate import DAM, attach, load, save


def images(rows=4):
    return {"pixel_values": torch.randn(rows, 3, 224, 224, generator=torch.Generator().manual_seed(0))}


def texts(folder, rows=4):
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    sentences = ["She is a doctor.", "He stays at home and cooks for the children.", "No.", "They wrote the report."]
    return dict(tokenizer(sentences[:rows], padding=True, return_tensors="pt"))


MODELS = {
    "dinov2-small": ("Dinov2ForImageClassification", DAM()),
    "clip-b16-vision": ("CLIPForImageClassification", DAM(append=True, freeze=True)),
    "minilm-l6": ("BertForSequenceClassification", DAM(stats_axes="batch_token")),
}


def classifier(kind, folder):
    if kind != "CLIPForImageClassification":
        silent = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        return getattr(hf, kind).from_pretrained(folder, **silent)
    # The folder has the image tower alone; the classifier wants it inside.
    tower = hf.CLIPVisionModel.from_pretrained(folder, dtype=torch.float32)
    model = hf.CLIPForImageClassification(hf.CLIPConfig(vision_config=tower.config.to_dict()))
    model.vision_model.load_state_dict(tower.state_dict())
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_pretrained_encoder_takes_it(name, real_model, tmp_path):
    folder = real_model(name)
    kind, dam = MODELS[name]
    inputs = texts(folder) if kind.startswith("Bert") else images()
    torch.manual_seed(0)
    model = attach(classifier(kind, folder), dam).train()
    labels = torch.tensor([0, 1, 0, 1])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = model(**inputs, labels=labels).loss
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    slope = sum(g.square().sum() for g in gradients if g is not None).item()
    with torch.no_grad():  # so short a way down that the loss should fall by a thousandth
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter -= 1e-3 * gradient / slope
        after = model(**inputs, labels=labels).loss
    assert loss.item() - after.item() == pytest.approx(1e-3, rel=0.2)
    model.eval()
    save(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path)(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)
