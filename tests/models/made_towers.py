"""The tokenizer of the small CLIP towers."""

import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [
    "a", "photo", "of", "woman", "man", "person", "girl", "boy", "this", "is", "portrait", "close-up", "lady", "old",
    "young", "elderly", "teenager",
]  # fmt: skip


def tokenizer(*more):
    """Words, and more of them, to numbers from 3 on; 59 ends a text, as the small towers expect."""
    vocabulary = {"<pad>": 0, "<unk>": 1, "<end>": 59, **{word: i + 3 for i, word in enumerate([*WORDS, *more])}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 59)])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<end>", model_max_length=64
    )
