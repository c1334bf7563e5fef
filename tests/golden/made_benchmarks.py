"""Two tiny language models, and each language benchmark as it is published, in the few words that they know."""

import csv
import json
from itertools import product

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

PEOPLE = (
    "nurse",
    "baker",
    "pilot",
    "poet",
    "clerk",
    "guard",
    "cook",
    "lawyer",
    "actor",
    "miner",
    "judge",
    "tailor",
    "farmer",
    "singer",
)
TRAITS = ("kind", "rude", "quick", "slow", "wise", "cruel", "calm", "loud")
THINGS = ("window", "stone", "river", "paper")
_OTHERS = (
    "<s> . ? , the a was and went home late he she him her his because with who people said that two met never always "
    "often money old young man woman girl boy not known christian muslim men women met at home of is in cold blue "
    "answer question context Context Question Answer : The He She"
)
WORDS = tuple(dict.fromkeys([*_OTHERS.split(), *PEOPLE, *TRAITS, *THINGS]))


def save_model(folder, seed):
    """A Llama of noise that is large enough for one text to be much likelier than another."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = hf.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(10)
    model.save_pretrained(folder)
    return folder


def write_benchmarks(root):
    """Each in the folder in which the suite looks for it."""
    rng = np.random.default_rng(0)
    for name, write in (
        ("crows_pairs", _crows_pairs),
        ("stereoset", _stereoset),
        ("bbq", _bbq),
        ("winobias", _winobias),
        ("bold", _bold),
        ("lexicons", _lexicons),
    ):
        (root / name).mkdir(parents=True)
        write(root / name, rng)
    (root / "text.txt").write_text("\n\n".join(_sentences(rng, 3) for _ in range(20)))
    return root


def _sentences(rng, n):
    """Random sentences, with a full stop after each."""
    found = []
    for _ in range(n):
        who, what, how = rng.choice(PEOPLE), rng.choice(THINGS), rng.choice(TRAITS)
        found.append(f"the {who} was {how} and went home with a {what} .")
    return " ".join(found)


def _crows_pairs(folder, rng):
    groups = {"gender": ("women", "men"), "age": ("old people", "young people"), "religion": ("muslim", "christian")}
    with (folder / "crows_pairs_anonymized.csv").open("w", newline="") as handle:
        rows = csv.writer(handle)
        rows.writerow(["", "sent_more", "sent_less", "stereo_antistereo", "bias_type", "annotations"])
        for i in range(60):
            kind = tuple(groups)[i % 3]
            tail = f"said that the {PEOPLE[i % len(PEOPLE)]} was {rng.choice(TRAITS)} and {rng.choice(TRAITS)} ."
            more, less = (f"{group} {tail}" for group in groups[kind][:: 1 if i % 4 else -1])
            rows.writerow([i, more, less, "stereo" if i % 5 else "antistereo", kind, f"[['{kind}']]"])


def _stereoset(folder, rng):
    kinds = {"intrasentence": [], "intersentence": []}
    for i in range(84):
        kind = tuple(kinds)[i % 2]
        target = PEOPLE[i // 2 % len(PEOPLE)]
        first, second = rng.choice(TRAITS, 2, replace=False)
        who = f"the {target}" if kind == "intrasentence" else rng.choice(["he", "she"])
        texts = [f"{who} was {filled} and went home ." for filled in (first, second, rng.choice(THINGS))]
        labels = ("stereotype", "anti-stereotype", "unrelated")
        kinds[kind].append(
            {
                "id": str(i),
                "target": target,
                "bias_type": ("profession", "gender", "race")[PEOPLE.index(target) % 3],
                "context": f"the {target} was BLANK and went home ." if i % 2 == 0 else f"people met the {target} .",
                "sentences": [{"sentence": t, "gold_label": g} for t, g in zip(texts, labels, strict=True)],
            }
        )
    (folder / "dev.json").write_text(json.dumps({"data": kinds}))


def _bbq(folder, rng):
    sides = {"Age": (("The old man", "old"), ("The young man", "nonOld")),
             "Religion": (("The muslim", "Muslim"), ("The christian", "Christian"))}  # fmt: skip
    for category, (first, second) in sides.items():
        rows = []
        for i, (template, polarity, condition, _) in enumerate(
            product(range(4), ("neg", "nonneg"), ("ambig", "disambig"), range(3))
        ):
            order = rng.permutation(3)
            answers = [(*first, 0), (*second, 1), ("not known", "unknown", 2)]
            placed = [answers[k] for k in order]
            right = 2 if condition == "ambig" else i % 2
            told = "" if condition == "ambig" else f" {answers[right][0]} was {rng.choice(TRAITS)} ."
            names = {f"ans{k}": placed[k][0] for k in range(3)}
            rows.append(
                {
                    "example_id": i,
                    "question_index": str(template),
                    "question_polarity": polarity,
                    "context_condition": condition,
                    "category": category,
                    "context": f"two people met at the {THINGS[template]} .{told}",
                    "question": f"who was {TRAITS[2 * template + (polarity == 'neg')]} ?",
                    **names,
                    "answer_info": {f"ans{k}": [placed[k][0], placed[k][1]] for k in range(3)},
                    "label": [answer[2] for answer in placed].index(right),
                    "additional_metadata": {"stereotyped_groups": [first[1]], "subcategory": "None"},
                }
            )
        (folder / f"{category}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _winobias(folder, rng):
    pronouns = {1: ("he", "she"), 2: ("him", "her")}
    for kind, part in product((1, 2), ("dev", "test")):
        lines = {"pro": [], "anti": []}
        for i in range(1, 17):
            one, other = rng.choice(PEOPLE, 2, replace=False)
            how = rng.choice(TRAITS)
            order = ("pro", "anti") if i % 2 else ("anti", "pro")
            for direction, pronoun in zip(order, pronouns[kind], strict=True):
                tail = f"because [{pronoun}] was {how} ." if kind == 1 else f"and went home with [{pronoun}] ."
                lines[direction].append(f"{i} [the {one}] met the {other} {tail}")
        for direction, found in lines.items():
            (folder / f"{direction}_stereotyped_type{kind}.txt.{part}").write_text("\n".join(found))


def _bold(folder, rng):
    domains = {"gender": ("actors", "actresses"), "race": ("asian", "african", "european")}
    for domain, groups in domains.items():
        prompts, whole = {}, {}
        for group in groups:
            # A page has one or two sentences; its beginning is the prompt.
            pages = {f"{group}{i}": [_sentences(rng, 1) for _ in range(1 + i % 2)] for i in range(12)}
            whole[group] = pages
            prompts[group] = {page: [f"{' '.join(t.split()[:3])} " for t in texts] for page, texts in pages.items()}
        for part, content in (("prompts", prompts), ("wikipedia", whole)):
            (folder / part).mkdir(exist_ok=True)
            name = f"{domain}_{'prompt' if part == 'prompts' else 'wiki'}.json"
            (folder / part / name).write_text(json.dumps(content))


def _lexicons(folder, rng):
    for name, mark, columns, top in (
        ("warriner_vad.csv", ",", ("Word", "V.Mean.Sum", "A.Mean.Sum", "D.Mean.Sum"), 9),
        ("be5_warriner_coling18.tsv", "\t", ("Word", "Joy", "Anger", "Sadness", "Fear", "Disgust"), 5),
    ):
        rows = [mark.join(columns)]
        for word in (*TRAITS, *THINGS):
            rows.append(mark.join([word, *(f"{x:.2f}" for x in rng.uniform(1, top, len(columns) - 1))]))
        (folder / name).write_text("\n".join(rows))
