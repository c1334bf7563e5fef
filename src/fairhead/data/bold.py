"""BOLD: the beginnings of Wikipedia sentences about people of different groups."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fairhead.data.datasets import Items, choose
from fairhead.data.files import MALFORMED, Skips, Source
from fairhead.errors import InputError

DOMAINS = ("gender", "political_ideology", "profession", "race", "religious_ideology")


@dataclass(frozen=True)
class BoldPrompt:
    """One prompt.

    Attributes:
        id: domain, group, entity and number, such as "gender/American_actors/Jacob_Zachar/0".
        domain: one of five, such as "race".
        group: such as "Asian_Americans".
        entity: the Wikipedia page.
        prompt: the beginning of a sentence, as published (it ends in a space).
        wikipedia: the whole sentence; None where the Wikipedia file is not there.
    """

    id: str
    domain: str
    group: str
    entity: str
    prompt: str
    wikipedia: str | None


def read_bold(
    path: str | os.PathLike[str], *, domains: Sequence[str] | None = None, on_error: str = "raise"
) -> Items[BoldPrompt]:
    """Read BOLD: `prompts/*_prompt.json`, and `wikipedia/*_wiki.json` where they are there.

    Args:
        path: a folder or zip archive, or one `*_prompt.json` file.
        domains: those to read; None reads all that are there.
        on_error: "raise", or "skip" to leave out domains whose file is broken, and entities that are.

    Example:
        >>> import json, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "race_prompt.json")
        >>> _ = file.write_text(json.dumps({"Asian_Americans": {"David_Choe": ["David Choe is a US artist from "]}}))
        >>> read_bold(file)[0].id
        'race/Asian_Americans/David_Choe/0'
    """
    source, skips = Source(path), Skips(on_error)
    here = [d for d in DOMAINS if any(n.endswith(f"{d}_prompt.json") for n in source.names)]
    if not here:
        raise source.missing("prompts/gender_prompt.json and its like", "BOLD")
    prompts: list[BoldPrompt] = []
    for domain in choose("domain", here if domains is None else domains, here):
        name = source.find(f"{domain}_prompt.json", "BOLD")
        wiki = f"{domain}_wiki.json"
        with_wikipedia = source.is_archive or not source.is_file
        try:
            sentences = source.json(source.find(wiki, "BOLD")) if with_wikipedia and source.matching(wiki) else None
            published = source.json(name)
        except InputError:
            if on_error == "raise":
                raise
            skips.drop("a file that cannot be read", domain)
            continue
        if not isinstance(published, dict) or not all(isinstance(g, dict) for g in published.values()):
            raise InputError(f"{source.where(name)}: BOLD has {{group: {{entity: [text]}}}} here")
        for group, entities in published.items():
            for entity, texts in entities.items():
                try:
                    prompts += _prompts(domain, group, entity, texts, sentences)
                except MALFORMED as error:
                    skips.malformed(source.where(name), f"{domain}/{group}/{entity}", error)
    if not prompts:
        raise InputError(f"{source.path}: none of BOLD's prompts there can be read ({', '.join(here)})")
    return Items("bold", tuple(prompts), skips.found(), {"data": "bold", "path": str(source.path)})


def _prompts(domain: str, group: str, entity: str, texts: Any, sentences: Any) -> list[BoldPrompt]:
    if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
        raise ValueError("expected a list of texts")
    whole = [None] * len(texts) if sentences is None else sentences[group][entity]
    if len(whole) != len(texts):
        raise ValueError(f"{len(texts)} prompts but {len(whole)} Wikipedia sentences")
    return [
        BoldPrompt(f"{domain}/{group}/{entity}/{i}", domain, group, entity, text, sentence)
        for i, (text, sentence) in enumerate(zip(texts, whole, strict=True))
    ]
