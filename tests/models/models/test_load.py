"""One `load` for folders, names of the hub, adapters and live models; what cannot be right is refused in one line."""

import ast
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from families import TEXT, TOWERS, VIT
from language_models import build, saved, tokenizer
from safetensors.torch import load_file, save_file

import fairhead
from fairhead.cli import main
from fairhead.errors import InputError, UnsupportedModel
from fairhead.language import load_scorer
from fairhead.locate.decompose import Decomposer, reads_of
from fairhead.locate.directions import classifier_task, text_classifier_task
from fairhead.mitigate import DAM, EncoderLayer
from fairhead.mitigate.language_trainer import train_folder
from fairhead.mitigate.two_stages import JTT
from fairhead.mitigate.without_training import SelfDebias
from fairhead.models import attach, load, method_of, open_model, save
from fairhead.models.attached import positions_of
from fairhead.models.fresh import Recipe
from fairhead.models.inputs import Pictures
from fairhead.models.places import find, processor_of, tokenizer_of
from fairhead.train.last_encoder import last_encoder

IMAGES = {
    "ViT": (hf.ViTForImageClassification, hf.ViTConfig(**VIT)),
    "DINOv2": (hf.Dinov2ForImageClassification, hf.Dinov2Config(**VIT)),
}
TEXTS = {
    "BERT": (hf.BertForSequenceClassification, hf.BertConfig(**TEXT)),
    "RoBERTa": (hf.RobertaForSequenceClassification, hf.RobertaConfig(**TEXT)),
}


def made(name, seed=0):
    torch.manual_seed(seed)
    kind, config = {**IMAGES, **TEXTS}[name]
    model = kind(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


def inputs(name, rows=8):
    chance = torch.Generator().manual_seed(1)
    if name in IMAGES:
        return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=chance)}
    ids = torch.randint(3, 60, (rows, 9), generator=chance)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


def carrying(name, method):
    """A model whose method has seen a few batches."""
    model = attach(made(name), method).train()
    for _ in range(3):
        model(**inputs(name))
    return model.eval()


def same(model, other, given):
    torch.testing.assert_close(model(**given).logits, other(**given).logits, rtol=0, atol=0)


def written(change, file):
    save_file({key: value.contiguous() for key, value in change(load_file(file)).items()}, file, {"format": "pt"})


@pytest.mark.parametrize("method", [DAM(momentum=0.5), DAM(momentum=0.5, stats_axes="batch_token")], ids=["one", "all"])
@pytest.mark.parametrize("name", [*IMAGES, *TEXTS])
def test_heads_of_a_dam_model_sum_to_the_logits_that_it_has_with_dam(name, method, tmp_path):
    wanted = carrying(name, method)
    save(wanted, tmp_path)
    model = open_model(tmp_path, "image" if name in IMAGES else "text", dtype="float32").model
    same(model, wanted, inputs(name))
    plain = made(name).eval()(**inputs(name)).logits
    assert (plain - wanted(**inputs(name)).logits).abs().max() > 1e-2, "DAM must change what the model says"
    reads = reads_of(model, inputs(name)) if name in IMAGES else None
    decomposer = Decomposer(model, reads or "first", unit=False)
    terms = decomposer(inputs(name))
    whole = decomposer.head_terms(terms.heads).sum((1, 2)) + terms.others.sum(1) + terms.constant
    torch.testing.assert_close(whole, terms.output, atol=1e-3, rtol=1e-3)
    task = classifier_task(model) if name in IMAGES else text_classifier_task(model)
    np.testing.assert_allclose(task.logits(whole.detach().numpy()), wanted(**inputs(name)).logits.detach(), atol=2e-3)


@pytest.mark.parametrize("method", [DAM(append=True), EncoderLayer()], ids=["dam", "layer"])
@pytest.mark.parametrize("name", ["ViT", "BERT"])
def test_heads_are_not_followed_through_an_appended_layer(name, method, tmp_path):
    save(carrying(name, method), tmp_path)
    with pytest.raises(UnsupportedModel, match=f"carries {type(method).__name__} with an encoder layer appended"):
        Decomposer(load(tmp_path))


def test_texts_are_padded_to_the_positions_that_dam_knows():
    assert positions_of(carrying("BERT", DAM())) == 9
    assert positions_of(carrying("BERT", DAM(stats_axes="batch_token"))) is None
    assert positions_of(made("BERT")) is None


def test_a_model_of_pictures_has_no_tokenizer_and_says_so(tmp_path):
    save(made("ViT"), tmp_path)
    with pytest.raises(UnsupportedModel, match="is a vit model, which reads pictures; texts need an encoder"):
        tokenizer_of(find(tmp_path))


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "t5"])
def test_a_model_of_texts_without_a_tokenizer_is_refused(family, tmp_path):
    """Transformers would make a tokenizer that knows no word, and every text would be the same."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(InputError, match=r"has no tokenizer: expected tokenizer.json beside .*config.json"):
        tokenizer_of(find(tmp_path))


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("language"))


def test_load_gives_a_self_debiased_model_back(language, tmp_path):
    loaded = open_model(language, "causal")
    wanted = attach(loaded.model, SelfDebias(("rude",), sentence="{} so"), loaded.tokenizer)
    save(wanted, tmp_path, loaded.tokenizer.save_pretrained)
    ids = {"input_ids": torch.tensor([[0, 1, 2, 3]])}
    for model in (fairhead.load(tmp_path), load_scorer(tmp_path, device="cpu").model):
        assert method_of(model) == SelfDebias(("rude",), sentence="{} so")
        same(model, wanted, ids)
    with pytest.raises(InputError, match="carries SelfDebias, which training would leave out"):
        train_folder(tmp_path, None, tmp_path / "out", "klaad")
    with pytest.raises(UnsupportedModel, match="carries SelfDebias, whose logits are not a sum"):
        Decomposer(load(tmp_path))
    hf.AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path)  # as it is without the method
    assert method_of(load(tmp_path)) is None


def test_what_cannot_be_attached_is_told():
    with pytest.raises(InputError, match="JTT is not a method that a model can carry; these are: dam, encoder_layer"):
        attach(made("ViT"), JTT())
    with pytest.raises(InputError, match="SelfDebias puts words before a text: give attach the model's tokenizer"):
        attach(build("llama"), SelfDebias())


def test_a_live_model_is_given_back_and_knows_its_folder(language):
    model = load(language).train()
    assert load(model) is model
    assert not model.training
    opened = open_model(model)
    assert opened.place.folder == language
    assert opened.tokenizer("the")["input_ids"] == tokenizer()("the")["input_ids"]
    with pytest.raises(InputError, match="was not loaded from a folder: give its tokenizer as well"):
        open_model(build("llama")).tokenizer.pad()
    assert open_model(build("llama"), tokenizer=tokenizer()).tokenizer.vocab_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {k: v for k, v in w.items() if k != "classifier.bias"}, r"lacks 1 that .* needs: classifier\.bias"),
        (lambda w: {**w, "classifier.bias": torch.zeros(7)}, r"classifier\.bias, \[7\] there and \[2\] in the model"),
        (lambda w: {**w, "classifier.bias": w["classifier.bias"] * float("nan")}, r"NaN or .*: classifier\.bias$"),
        (lambda w: {**w, "classifier.bias": w["classifier.bias"] / 0}, r"NaN or .*: classifier\.bias$"),
        (lambda w: {k: v * float("nan") for k, v in w.items()}, r"cls_token, \S+, \S+, \S+ and 36 more$"),
    ],
    ids=["missing", "misshapen", "nan", "inf", "all"],
)
def test_weights_that_cannot_be_right_are_refused_by_name(change, message, tmp_path):
    save(made("ViT"), tmp_path)
    written(change, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=message) as found:
        load(tmp_path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("size", [0, 5, 2000])
def test_a_file_that_was_cut_off_is_one_line(size, tmp_path):
    save(carrying("ViT", DAM()), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InputError, match="the weights cannot be loaded") as found:
        load(tmp_path)
    assert "\n" not in str(found.value)


def test_weights_in_pickle_are_not_read(tmp_path):
    save(made("ViT"), tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="the weights cannot be loaded"):
        load(tmp_path)


@pytest.mark.parametrize("named", [["Trainer"], ["AutoConfig"], [3], [{}], ["no.such"], {}, []])
def test_odd_architectures_are_one_line(named, tmp_path):
    save(made("ViT"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": named}))
    with pytest.raises(InputError, match=r"config\.json") as found:
        load(tmp_path)
    assert "\n" not in str(found.value)
    if named:
        with pytest.raises(UnsupportedModel, match="a causal language model"):
            open_model(tmp_path, "causal")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_remote_code_is_not_run_and_nobody_is_asked(file, language, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody is asked"))
    save(made("ViT"), tmp_path)
    hf.ViTImageProcessorPil().save_pretrained(tmp_path)
    shutil.copy(language / "tokenizer.json", tmp_path)
    shutil.copy(language / "tokenizer_config.json", tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    kinds = ("Config", "Model", "ModelForImageClassification", "ImageProcessor", "Processor")
    auto = {f"Auto{kind}": "own.Own" for kind in kinds} | {"AutoTokenizer": ["own.Own", "own.Own"]}
    odd = {"model_type": "own", "tokenizer_class": "Own", "image_processor_type": "Own", "auto_map": auto}
    content = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**content, **odd}))
    with pytest.raises(InputError, match=r"asks for code of its own \(auto_map\), which is not run"):
        _ = [getattr(open_model(tmp_path), part) for part in ("tokenizer", "processor")]
    assert not ran.exists()
    config = json.loads((language / "config.json").read_text())  # beside a class of transformers, code is not looked at
    whole = shutil.copytree(language, tmp_path / "whole")
    (whole / "config.json").write_text(json.dumps({**config, "auto_map": auto}))
    shutil.copy(tmp_path / "own.py", whole)
    assert isinstance(load(whole), hf.LlamaForCausalLM)
    assert not ran.exists()


@pytest.mark.parametrize(
    "odd",
    [
        {"image_mean": [0.5, 0.5]},
        {"image_std": None},
        {"image_std": [0.5, 0.5, 0.0]},
        {"image_mean": ["a", "b", "c"]},
        {"size": {"height": -1.5, "width": 8}},
        {"size": {"height": 0, "width": 8}},
    ],
)
def test_pictures_that_nobody_can_make_ready_are_one_line(odd, tmp_path):
    save(made("ViT"), tmp_path)
    Pictures(8).save(tmp_path)
    place = find(tmp_path)
    assert (processor_of(place).size["height"], Pictures.of(place)) == (8, Pictures(8))
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, **odd}))
    for read in (processor_of, Pictures.of):
        with pytest.raises(InputError, match=re.escape(str(tmp_path))) as found:
            read(place)
        assert "\n" not in str(found.value)


def test_pictures_of_a_size_that_the_model_does_not_take_are_one_line(tmp_path):
    save(made("ViT"), tmp_path)
    Pictures(16).save(tmp_path)
    with pytest.raises(InputError, match="makes pictures of 16 × 16 pixels, and the model takes 8 × 8 only"):
        processor_of(find(tmp_path))


def test_every_model_is_read_as_safetensors_and_without_remote_code():
    """So that a new door is shut on the day it is built."""
    seen = 0
    for file in Path(fairhead.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "from_pretrained":
                given = {one.arg: getattr(one.value, "value", None) for one in call.keywords}
                place = f"{file.name}, line {call.lineno}: {ast.unparse(call)}"
                assert given.get("local_files_only") is True, place
                # PEFT runs no code of a folder; its weights are looked for by their name before, see `_in_adapter`.
                adapter = ast.unparse(call.func) == "PeftModel.from_pretrained"
                assert adapter or given.get("trust_remote_code") is False, place
                # `read_beside` reads no weights.
                assert adapter or "read_beside" in _around(file, call) or given.get("use_safetensors") is True, place
                seen += 1
    assert seen >= 3


def _around(file, call):
    """The names of the functions that a call stands in."""
    found = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    functions = [one for one in found if isinstance(one, ast.FunctionDef)]
    return [one.name for one in functions if one.lineno <= call.lineno <= one.end_lineno]


def test_a_name_of_the_hub_is_read_from_the_cache_alone(language, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        InputError, match=r"nor is a model .* in the local cache of the hub \(hub:someone/llama fetches it\)"
    ):
        load("someone/llama")
    snapshot = tmp_path / "models--someone--llama" / "snapshots" / "abc"
    shutil.copytree(language, snapshot)
    (tmp_path / "models--someone--llama" / "refs").mkdir()
    (tmp_path / "models--someone--llama" / "refs" / "main").write_text("abc")
    ids = {"input_ids": torch.tensor([[0, 1, 2, 3]])}
    same(load("someone/llama"), load(language), ids)
    same(load_scorer("someone/llama", device="cpu", dtype="float32").model, load(language), ids)
    offline = []  # only where the user says so is the network asked
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **how: offline.append(how) or language)
    load("someone/other")
    load("hub:someone/other")
    load("someone/other", download=True)
    assert [how["local_files_only"] for how in offline] == [True, False, False]


@pytest.fixture
def adapter(language, tmp_path):
    """A LoRA adapter of the language model, and the model that it was saved from."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(load(language), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    return adapted.eval(), tmp_path / "adapter"


def test_a_lora_adapter_is_merged_into_its_base(adapter, language, capsys, tmp_path):
    adapted, folder = adapter
    ids = {"input_ids": torch.tensor([[0, 1, 2, 3]])}
    wanted = adapted(**ids).logits
    assert (wanted - load(language)(**ids).logits).abs().max() > 1e-3
    for model in (load(folder), load_scorer(folder, device="cpu").model):  # the tokenizer is that of the base
        torch.testing.assert_close(model(**ids).logits, wanted, atol=1e-5, rtol=1e-5)
    save(load(folder), tmp_path / "whole")
    torch.testing.assert_close(
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(**ids).logits, wanted, atol=1e-5, rtol=1e-5
    )


def test_an_adapter_that_cannot_be_read_is_one_line(adapter, tmp_path, monkeypatch):
    _, folder = adapter
    weights = folder / "adapter_model.safetensors"
    kept = weights.read_bytes()
    weights.unlink()
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors: weights are read as safetensors only"):
        load(folder)
    weights.write_bytes(kept[:100])
    with pytest.raises(InputError, match="the adapter cannot be loaded"):
        load(folder)
    save_file({}, weights)
    with pytest.raises(InputError, match="the adapter lacks 6 weights of those that it names, such as model"):
        load(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    ran = tmp_path / "ran"
    (tmp_path / "imported.py").write_text(f"open({str(ran)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)  # as the working folder is with `python -m fairhead`
    for odd in ({"megatron_config": {"a": 1}, "megatron_core": "imported"}, {"peft_type": "PROMPT_TUNING"}):
        (folder / "adapter_config.json").write_text(json.dumps({**settings, **odd}))
        with pytest.raises(InputError, match="; plain LoRA is read"):
            load(folder)
    assert not ran.exists()
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "someone/gone"}))
    with pytest.raises(
        InputError, match="is a LoRA adapter of someone/gone, which is neither a folder here nor cached"
    ):
        load(folder)


def test_an_adapter_brings_its_own_task_head(tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    hf.BertModel(hf.BertConfig(**TEXT)).save_pretrained(tmp_path / "base")
    base = hf.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    settings = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False)
    adapted = get_peft_model(base, settings).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    wanted = adapted(**inputs("BERT")).logits
    for model in (load(tmp_path / "adapter"), open_model(tmp_path / "adapter", "text").model):
        torch.testing.assert_close(model(**inputs("BERT")).logits, wanted, atol=1e-5, rtol=1e-5)


def test_a_lora_adapter_of_a_dam_model_keeps_dam(tmp_path):
    from peft import LoraConfig, get_peft_model

    save(carrying("ViT", DAM()), tmp_path / "base")
    torch.manual_seed(1)
    adapted = get_peft_model(
        load(tmp_path / "base"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    again = load(tmp_path / "adapter")
    assert method_of(again) == DAM()
    torch.testing.assert_close(again(**inputs("ViT")).logits, adapted(**inputs("ViT")).logits, atol=1e-5, rtol=1e-5)


def test_a_task_head_is_fresh_where_it_is_to_be_trained_and_nothing_else_is(tmp_path):
    save(made("ViT"), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": 8}')
    for name in (f"path:{tmp_path}", str(tmp_path)):
        model = Recipe(name, ("a", "b", "c")).build("image", seed=0)  # the file has two classes
        assert model.classifier.weight.shape[0] == 3
        torch.testing.assert_close(model.vit.layernorm.weight, made("ViT").vit.layernorm.weight, rtol=0, atol=0)
    with pytest.raises(InputError, match="has no setting 'width'; it has image_size"):
        Recipe(str(tmp_path), ("a", "b"), {"width": 16}).check()
    written(lambda w: {k: v for k, v in w.items() if k != "vit.layernorm.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"lacks 1 that the model needs: vit\.layernorm\.weight"):
        Recipe(f"path:{tmp_path}", ("a", "b")).build("image", seed=0)


def test_training_that_begins_with_a_dam_model_keeps_dam_or_says_so(tmp_path):
    save(carrying("ViT", DAM()), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": 8}')
    model = Recipe(str(tmp_path), ("a", "b")).build("image", seed=0)
    same(model, load(tmp_path), inputs("ViT"))
    with pytest.raises(InputError, match="carries DAM, which last-encoder training would leave out"):
        last_encoder(model)
    with pytest.raises(InputError, match=r"carries DAM.* already"):
        attach(model, DAM())


def test_features_of_a_classifier_do_not_pass_a_random_pooler(tmp_path):
    save(made("ViT"), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": 8}')
    trunk = Recipe(f"path:{tmp_path}", ("a", "b")).build_trunk("image").eval()
    output = trunk(**inputs("ViT"))
    assert output.pooler_output is None
    wanted = made("ViT").eval().vit(**inputs("ViT")).last_hidden_state
    torch.testing.assert_close(output.last_hidden_state, wanted)


@pytest.mark.parametrize(("family", "types"), [("Bert", True), ("DistilBert", False)])
def test_a_tokenizer_gives_what_the_model_takes(family, types, tmp_path):
    getattr(hf, f"{family}Config")().save_pretrained(tmp_path)
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good"])}
    hf.BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path)
    given = tokenizer_of(find(tmp_path))("good good")
    assert ("token_type_ids" in given) == types
    assert given["input_ids"] == [2, 5, 5, 3]


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_a_tower_saved_alone_gets_a_classifier(family, tmp_path):
    tower = getattr(hf, f"{family}VisionModel")(getattr(hf, f"{family}VisionConfig")(**TOWERS["vision_config"]))
    tower.eval().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": 8}')
    model = Recipe(f"path:{tmp_path}", ("no", "yes")).build("image", 0)
    model.save_pretrained(tmp_path / "saved")
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for found in (model, open_model(tmp_path / "saved").model):
        hidden = found.eval().vision_model(pixels).last_hidden_state
        torch.testing.assert_close(hidden, tower(pixels).last_hidden_state)


def test_a_tower_is_read_as_it_is_named(tmp_path):
    torch.manual_seed(0)
    towers = {**TOWERS, "vision_config": {**TOWERS["vision_config"], "projection_dim": 16}}
    hf.CLIPModel(hf.CLIPConfig(**towers)).save_pretrained(tmp_path)
    assert type(open_model(tmp_path, "image").model).__name__ == "CLIPModel"
    assert type(open_model(tmp_path, "encoder").model).__name__ == "CLIPVisionModelWithProjection"
    with pytest.raises(UnsupportedModel, match="holds a CLIPModel; expected a causal language model"):
        open_model(tmp_path, "causal")
    save(made("BERT"), tmp_path / "bert")
    with pytest.raises(InputError, match="holds a BertForSequenceClassification, which reads input_ids and no images"):
        open_model(tmp_path / "bert", "image")


@pytest.mark.parametrize(
    "command",
    [
        ["locate", "--data", "crows:{}", "--model"],
        ["ablate", "--data", "crows:{}", "--heads", "L0H0", "--model"],
        ["lm", "crows", "--data", "{}", "--model"],
        ["mitigate", "self_debias", "--out", "{}.out", "--model"],
    ],
)
def test_commands_say_the_same_of_a_model_that_is_not_there(command, tmp_path, capsys):
    file = tmp_path / "crows_pairs_anonymized.csv"
    rows = [f"{i},she {i},he {i},stereo,gender,[['gender']]" for i in range(40)]
    file.write_text("\n".join([",sent_more,sent_less,stereo_antistereo,bias_type,annotations", *rows]))
    with pytest.raises(SystemExit):
        main([part.format(file) for part in command] + ["nowhere/at/all"])
    said = "fairhead: error: nowhere/at/all: expected a folder with a model (config.json); it is not there\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("model", [None, 3])
def test_what_is_no_model_at_all_is_said(model):
    with pytest.raises(InputError, match=f"the model is {model}; expected a folder, hub:OWNER/NAME"):
        fairhead.load(model)
