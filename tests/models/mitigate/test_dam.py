"""DAM against the paper's equations, written out here step by step."""

import copy
import math
import re
from threading import Lock

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from fairhead.errors import InputError, UnsupportedModel
from fairhead.mitigate import DAM, EncoderLayer, attach, load, save
from fairhead.mitigate.dam import most_attended, supervised_contrastive
from fairhead.models import method_of

WIDTH, HEADS, TOKENS = 16, 4, 5


def tiny_vit(**changes):
    settings = {
        "image_size": 4,
        "patch_size": 2,
        "num_channels": 1,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_labels": 2,
    }
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**(settings | changes)))
    for parameter in model.parameters():  # the usual start is so near zero that attention is flat
        nn.init.normal_(parameter, std=0.3)
    return model


def images(rows=6, seed=0):
    return torch.randn(rows, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def last_layer_input(model, pixels):
    """What the last attention layer is given, [B, T, D]."""
    seen = []
    attention = model.vit.layers[-1].attention
    handle = attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(pixels)
    handle.remove()
    return seen[0]


def project_heads(linear, x):
    """[B, T, D] -> [B, H, T, d]"""
    return linear(x).reshape(*x.shape[:2], HEADS, -1).transpose(1, 2)


def attention_output(model, pixels):
    seen = []
    handle = model.vit.layers[-1].attention.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    model(pixels)
    handle.remove()
    return seen[0]


def reference(model, pixels, axes, absolute=True, temperature=1.0, eps=1e-5):
    """Theorem 1's q and k with the batch's own statistics, then equation 1. No call into fairhead."""
    attention = model.vit.layers[-1].attention
    x = last_layer_input(model, pixels)
    q, k, v = (project_heads(linear, x) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))

    def m_of_n(t):
        t = (t - t.mean(axes, keepdim=True)) / (t.var(axes, keepdim=True) + eps).sqrt()
        return t.abs() if absolute else t

    logits = m_of_n(q) @ m_of_n(k).transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = (logits / temperature).softmax(-1)
    return weights, v, attention.o_proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("dam", "axes", "absolute", "temperature"),
    [
        (DAM(), (0,), True, 1.0),
        (DAM(absolute=False), (0,), False, 1.0),
        (DAM(stats_axes="batch_token"), (0, 2), True, 1.0),
        (DAM(temperature=0.07), (0,), True, 0.07),
    ],
)
def test_attention_follows_the_paper(dam, axes, absolute, temperature):
    model, pixels = attach(tiny_vit(), dam).train(), images()
    _, _, expected = reference(model, pixels, axes, absolute, temperature)
    torch.testing.assert_close(attention_output(model, pixels), expected, rtol=1e-4, atol=1e-5)


def test_only_the_chosen_layer_changes():
    plain, with_dam = tiny_vit(), attach(tiny_vit(), DAM()).train()
    torch.testing.assert_close(last_layer_input(plain, images()), last_layer_input(with_dam, images()))
    assert not torch.allclose(attention_output(plain, images()), attention_output(with_dam, images()), atol=1e-3)


def test_running_statistics_average_means_and_deviations():
    model = attach(tiny_vit(), DAM(momentum=0.25)).train()
    attention = model.vit.layers[-1].attention
    mean, deviation = torch.zeros(HEADS, TOKENS, 4), torch.ones(HEADS, TOKENS, 4)
    for seed in range(3):
        k = project_heads(attention.k_proj, last_layer_input(tiny_vit(), images(seed=seed)))
        mean = 0.75 * mean + 0.25 * k.mean(0)
        deviation = 0.75 * deviation + 0.25 * k.std(0)
        model(images(seed=seed))
    torch.testing.assert_close(model.dam.k.mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.dam.k.deviation, deviation, rtol=1e-3, atol=1e-4)


def test_evaluation_uses_running_statistics_and_rows_do_not_meet():
    model = attach(tiny_vit(), DAM()).train()
    for seed in range(3):
        model(images(seed=seed))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.eval()
    together = model(images()).logits
    alone = torch.cat([model(image[None]).logits for image in images()])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, before[name], msg=f"{name} moved at evaluation")


def test_a_batch_of_one_trains_on_the_running_statistics():
    model = attach(tiny_vit(), DAM()).train()
    model(images())
    before = model.dam.q.mean.clone()
    loss = model(pixel_values=images(1), labels=torch.tensor([1])).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    torch.testing.assert_close(model.dam.q.mean, before)


def test_a_constant_query_gives_finite_gradients():
    # In the first layer the first token is the same for every image: its queries have no deviation.
    model = attach(tiny_vit(), DAM(layer=0)).train()
    model(pixel_values=images(), labels=torch.arange(6) % 2).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_alignment_is_in_the_models_own_loss_and_only_while_training():
    labels = torch.tensor([0, 0, 1, 1, 1, 0])
    model = attach(tiny_vit(), DAM(alignment_weight=0.5, values=2)).train()
    weights, v, _ = reference(model, images(), (0,))
    order = weights[:, :, 0, 1:].mean(1).argsort(-1, descending=True)[:, :2] + 1
    z = []
    for row in range(6):
        chosen = torch.cat([v[row, :, token].flatten() for token in order[row]])
        hidden = torch.relu(model.dam.project[0].weight @ chosen)
        z.append(model.dam.project[2].weight @ hidden)
        z[-1] = (z[-1] / z[-1].norm()).detach()
    anchors = []
    for i in range(6):
        others = [j for j in range(6) if j != i]
        bottom = sum(math.exp(z[i] @ z[j] / 0.07) for j in others)
        positives = [j for j in others if labels[j] == labels[i]]
        anchors.append(-sum(math.log(math.exp(z[i] @ z[p] / 0.07) / bottom) for p in positives) / len(positives))
    out = model(pixel_values=images(), labels=labels)
    task = nn.functional.cross_entropy(out.logits, labels)
    assert out.loss.item() == pytest.approx(task.item() + 0.5 * sum(anchors) / 6, rel=1e-4)
    as_tuple = model(pixel_values=images(), labels=labels, return_dict=False)
    assert as_tuple[0].item() == pytest.approx(out.loss.item(), rel=1e-5)

    model.eval()
    out = model(pixel_values=images(), labels=labels)
    assert out.loss.item() == pytest.approx(nn.functional.cross_entropy(out.logits, labels).item(), rel=1e-6)


def test_an_unchanged_trainer_trains_it(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = attach(tiny_vit(), DAM())
    rows = [{"pixel_values": image, "labels": number % 2} for number, image in enumerate(images(16))]
    arguments = TrainingArguments(
        tmp_path, num_train_epochs=2, per_device_train_batch_size=8, report_to="none", use_cpu=True, save_strategy="no"
    )
    before = model.dam.project[0].weight.clone()
    Trainer(model, arguments, train_dataset=rows).train()
    assert not torch.equal(model.dam.project[0].weight, before)  # the loss that it minimised had the alignment in it
    assert (model.dam.k.mean != 0).all()


@pytest.mark.parametrize(
    "dam",
    [DAM(momentum=0.5), DAM(append=True), DAM(normalise=False, alignment_weight=0)],
    ids=["in place", "appended", "without weights"],
)
def test_what_a_trainer_or_the_model_itself_saves_comes_back_with_the_method(dam, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = attach(tiny_vit(), dam)
    rows = [{"pixel_values": image, "labels": number % 2} for number, image in enumerate(images(16))]
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=2, per_device_train_batch_size=8, report_to="none", use_cpu=True, save_steps=2
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(tmp_path / "trainer")
    model.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "shards", max_shard_size="2KB")
    wanted = model.eval()(images()).logits
    for folder in ("trainer", "run/checkpoint-2", "model", "shards"):
        again = load(tmp_path / folder)
        assert method_of(again) == dam
        torch.testing.assert_close(again(images()).logits, wanted, rtol=0, atol=0)


def test_a_folder_that_lacks_a_part_of_the_method_is_told(tmp_path):
    from safetensors.torch import load_file, save_file

    model = attach(tiny_vit(), DAM())
    save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)

    def write(change):
        save_file(
            {key: value for key, value in change(dict(whole)).items() if value is not None}, file, {"format": "pt"}
        )

    def note(text):
        write(lambda kept: {**kept, "fairhead._extra_state": torch.tensor(list(text.encode()), dtype=torch.uint8)})

    write(lambda kept: {**kept, "fairhead._extra_state": None})
    with pytest.raises(InputError, match=r"has weights of a method \('dam.* and not its settings"):
        load(tmp_path)
    note("{")
    with pytest.raises(InputError, match="does not name a method and its settings"):
        load(tmp_path)
    note('{"method": "dma", "settings": {}}')
    with pytest.raises(InputError, match=r"names the method 'dma'; known: dam, .* Did you mean 'dam'"):
        load(tmp_path)
    note('{"method": "dam", "settings": {"valeus": 2}}')
    with pytest.raises(InputError, match="a setting 'valeus' that 'dam' has not"):
        load(tmp_path)
    write(lambda kept: {**kept, "dam.q.mean": None})
    with pytest.raises(InputError, match=r"'dam.q.mean' is in one only. Another version of fairhead wrote them"):
        load(tmp_path)
    write(lambda kept: {key: value for key, value in kept.items() if not key.startswith(("dam", "fairhead"))})
    assert method_of(load(tmp_path)) is None
    (tmp_path / "fairhead.json").write_text("{}")  # where earlier versions kept methods
    with pytest.raises(InputError, match="does not say whether it belongs to these: delete it"):
        load(tmp_path)
    save(model, tmp_path)
    assert method_of(load(tmp_path)) == DAM()


@pytest.mark.parametrize("named", ["null", '["NoSuchModel"]'])
def test_a_model_of_a_class_that_is_not_known_is_told(named, tmp_path):
    save(tiny_vit(), tmp_path)
    config = tmp_path / "config.json"
    text = re.sub(r'"architectures": \[[^]]*\]', f'"architectures": {named}', config.read_text())
    config.write_text(text)
    with pytest.raises(InputError, match="as the model's class, which transformers lacks"):
        load(tmp_path)


def test_gradients_match_finite_differences():
    model = attach(tiny_vit(), DAM()).double().train()
    weight = model.vit.layers[-1].attention.k_proj.weight
    pixels, labels = images().double(), torch.tensor([0, 0, 1, 1, 1, 0])

    def loss():
        return model(pixel_values=pixels, labels=labels).loss

    loss().backward()
    step = 1e-6
    for place in [(0, 0), (3, 7), (15, 2)]:
        with torch.no_grad():
            weight[place] += step
            up = loss().item()
            weight[place] -= 2 * step
            down = loss().item()
            weight[place] += step
        assert weight.grad[place].item() == pytest.approx((up - down) / (2 * step), rel=1e-3, abs=1e-6)


def test_contrastive_loss_worked_by_hand():
    # Angles 0°, 60° (class 0) and 90° (class 1, alone); τ = 0.5. Only the first two rows are anchors.
    z = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(0.75)], [0.0, 1.0]])
    first = math.log(math.exp(1.0) / (math.exp(1.0) + math.exp(0.0)))
    second = math.log(math.exp(1.0) / (math.exp(1.0) + math.exp(math.sqrt(3.0))))
    loss = supervised_contrastive(z, torch.tensor([0, 0, 1]), temperature=0.5)
    assert loss.item() == pytest.approx(-(first + second) / 2, rel=1e-6)


def test_a_batch_without_positives_costs_nothing_and_has_zero_gradients():
    z = nn.functional.normalize(torch.randn(3, 4), dim=-1).requires_grad_()
    loss = supervised_contrastive(z, torch.tensor([0, 1, 2]))
    loss.backward()
    assert loss.item() == 0
    assert (z.grad == 0).all()


def test_most_attended_can_take_the_first_token_in_or_leave_it_out():
    weights = torch.tensor([[[0.7, 0.1, 0.2], [0.5, 0.4, 0.1]]])  # mean over heads: 0.6, 0.25, 0.15
    values = torch.arange(12.0).reshape(1, 2, 3, 2)
    assert most_attended(weights, values, 1).tolist() == [[[2, 3, 8, 9]]]
    assert most_attended(weights, values, 1, first_token="in").tolist() == [[[0, 1, 6, 7]]]
    with pytest.raises(InputError, match="aligns 3 values but there are only 2 tokens"):
        most_attended(weights, values, 3)


def test_padding_is_never_picked():
    config = BertConfig(
        vocab_size=20, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=16
    )
    torch.manual_seed(0)
    model = attach(BertForSequenceClassification(config), DAM(values=2)).train()
    picked = []
    model.dam.project.register_forward_pre_hook(lambda module, args: picked.append(args[0]))
    ids = torch.randint(1, 20, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 0, 0, 0]] * 4)  # first token and two words: both words must be picked
    values = []
    value_projection = model.bert.encoder.layer[-1].attention.self.value
    value_projection.register_forward_hook(lambda module, args, out: values.append(out))
    model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
    words = {tuple(row.tolist()) for row in values[0][:, 1:3].reshape(-1, WIDTH)}
    assert {tuple(row.tolist()) for row in picked[0].reshape(-1, WIDTH)} == words


def test_a_saved_model_comes_back_with_the_same_outputs(tmp_path):
    model = attach(tiny_vit(), DAM(momentum=0.5)).train()
    model(images())
    save(model.eval(), tmp_path)
    again = load(tmp_path)
    torch.testing.assert_close(again(images()).logits, model(images()).logits, rtol=0, atol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    # Without fairhead the folder is still the ordinary model it grew from.
    plain = ViTForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(plain.classifier.weight, model.classifier.weight, rtol=0, atol=0)


def test_a_folder_that_had_another_model_gives_back_the_later_one(tmp_path):
    earlier, later = (attach(tiny_vit(), DAM(momentum=share)).train() for share in (0.1, 0.5))
    for model in (earlier, later):
        model(images())
        model.eval()
    save(earlier, tmp_path)
    later.save_pretrained(tmp_path)
    torch.testing.assert_close(load(tmp_path)(images()).logits, later(images()).logits, rtol=0, atol=0)
    save(earlier, tmp_path)
    torch.testing.assert_close(load(tmp_path)(images()).logits, earlier(images()).logits, rtol=0, atol=0)
    save(tiny_vit(), tmp_path)
    assert method_of(load(tmp_path)) is None
    save(later, tmp_path)
    tiny_vit().save_pretrained(tmp_path)  # a plain model, by its own means
    assert method_of(load(tmp_path)) is None
    torch.testing.assert_close(load(tmp_path)(images()).logits, tiny_vit()(images()).logits, rtol=0, atol=0)
    later.save_pretrained(tmp_path, max_shard_size="2KB")
    save(tiny_vit(), tmp_path)  # no shard of the other model is left
    assert method_of(load(tmp_path)) is None
    assert not list(tmp_path.glob("model-*"))


def test_what_is_switched_off_leaves_no_trace():
    model = attach(tiny_vit(), DAM(normalise=False, absolute=False, alignment_weight=0)).train()
    torch.testing.assert_close(model(images()).logits, tiny_vit().train()(images()).logits, rtol=0, atol=0)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in tiny_vit().named_parameters()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in tiny_vit().named_buffers()]


def test_bad_use_is_told(tmp_path):
    with pytest.raises(InputError, match="already"):
        attach(attach(tiny_vit(), DAM()), DAM())
    with pytest.raises(InputError, match="layer 7 does not exist"):
        attach(tiny_vit(), DAM(layer=7))
    model = attach(tiny_vit(), DAM()).train()
    with pytest.raises(InputError, match=r"found labels of shape \[6, 2\]"):
        model(pixel_values=images(), labels=torch.zeros(6, 2))
    model(images())
    with pytest.raises(InputError, match="5 token positions but this batch has 10"):
        model.dam.k(torch.zeros(2, HEADS, 10, 4))
    with pytest.raises(
        InputError, match="5 token positions but this batch has 10: pad to the length it was trained with"
    ):
        model.dam.k(torch.zeros(2, HEADS, 10, 4), torch.ones(2, 10))  # padded to the longest text of another batch
    with pytest.raises(InputError, match=r"no config\.json"):
        load(tmp_path)


def test_grouped_queries_are_refused_by_name():
    from transformers import EuroBertConfig, EuroBertForSequenceClassification

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    config = EuroBertConfig(**shape, vocab_size=10, num_key_value_heads=2, mask_token_id=1, pad_token_id=0)
    with pytest.raises(UnsupportedModel, match="EuroBertAttention groups 4 query heads over 2 key heads"):
        attach(EuroBertForSequenceClassification(config), DAM())


@pytest.mark.parametrize("method", [DAM(), DAM(append=True), EncoderLayer()], ids=["dam", "appended", "layer"])
@pytest.mark.parametrize("family", ["GPT2", "Llama", "T5"])
def test_a_family_without_an_encoder_is_named(family, method):
    import transformers

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape |= {"vocab_size": 10, "bos_token_id": 1, "eos_token_id": 2}
    shape |= {"num_layers": 1, "num_heads": 4, "d_kv": 4, "d_ff": 16} if family == "T5" else {}
    config = getattr(transformers, f"{family}Config")(**shape)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    with pytest.raises(UnsupportedModel, match=f"{family}ForSequenceClassification is no encoder.*RoBERTa"):
        attach(model, method)


def test_an_evaluation_that_was_recorded_leaves_nothing_that_cannot_be_copied():
    model = attach(tiny_vit(), DAM(hidden=8, width=4)).eval()
    model.dam.side_stream._since = Lock()  # stands in for an event of CUDA, which cannot be copied either
    with pytest.raises(TypeError, match="pickle"):
        copy.deepcopy(model)
    model(images())
    copy.deepcopy(model)
