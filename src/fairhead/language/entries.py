"""The benchmarks of the suite: where each finds its items, and how it makes a table of a model's answers to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fairhead.errors import FairheadError, InputError
from fairhead.language.benchmarks.perplexity import Document, split_documents, wikipedia_documents
from fairhead.language.run import sample, scored_table
from fairhead.language.scores import Journal, Progress, journal_path
from fairhead.language.tables import ItemTable
from fairhead.language.training_record import without_training_targets


@dataclass(frozen=True)
class SuiteOptions:
    """What may be chosen.

    Attributes:
        only: benchmarks by their flags; all where none is named.
        limit: items of each benchmark, drawn at random; None takes all.
        seed: of that draw, and of everything else that is drawn.
        held_out_of: folder of a trained model: items of StereoSet with its training targets are left out.
        text: a text file for perplexity and attention entropy; None takes the Wikipedia texts that come with BOLD.
        documents: documents of that text for perplexity, drawn at random.
        attention_documents: documents for attention entropy, the first of those.
        window: tokens that perplexity reads at a time; None as `perplexity.table` has it.
        prompt: of BBQ.
        inter: of StereoSet.
        lexicons: folder with the lexica of BOLD's valence, arousal, dominance and emotions; None goes without.
        bold_batch: prompts of BOLD that are continued together.
    """

    only: tuple[str, ...] = ()
    limit: int | None = None
    seed: int = 0
    held_out_of: str | None = None
    text: str | None = None
    documents: int = 1000
    attention_documents: int = 200
    window: int | None = None
    prompt: str = "plain"
    inter: str = "sentence"
    lexicons: str | None = None
    bold_batch: int = 64


@dataclass(frozen=True)
class Work:
    """What an entry is given.

    Attributes:
        scorer: the model.
        settings: what its scores depend on.
        items: what the entry's `read` returned.
        journals: folder of the journals.
        options: of the suite.
        progress: to be called with what is done and how much there is.
    """

    scorer: Any
    settings: Mapping[str, Any]
    items: Sequence[Any]
    journals: Path
    options: SuiteOptions
    progress: Progress | None


@dataclass(frozen=True)
class Entry:
    """A benchmark of the suite.

    Attributes:
        flag: what the command line calls it.
        name: of its files, and of the module of this package that has its measures.
        data: folder under the data folder.
        read: items from the path of the data.
        make: the table of a model's answers.
        options: those of `SuiteOptions` that its answers depend on beyond its items.
        reads_text: whether a text file can stand in for its data.
        min_items: with fewer its figures are undefined.
    """

    flag: str
    name: str
    data: str
    read: Callable[[Path, SuiteOptions], Sequence[Any]]
    make: Callable[[Work], ItemTable]
    options: tuple[str, ...] = ()
    reads_text: bool = False
    min_items: int = 10

    def settings(self, options: SuiteOptions) -> Mapping[str, Any]:
        """The options that the table depends on."""
        return {name: getattr(options, name) for name in self.options}


def _items(name: str) -> Callable[[Path, SuiteOptions], Sequence[Any]]:
    def read_items(path: Path, options: SuiteOptions) -> Sequence[Any]:
        from fairhead.data import read
        from fairhead.data.dataset import Items

        published = read(name, path)
        assert isinstance(published, Items)
        found: Sequence[Any] = published.items
        if name == "stereoset" and options.held_out_of is not None:
            found = without_training_targets(found, options.held_out_of)
        return found if options.limit is None else sample(found, options.limit, options.seed)

    return read_items


def _scored(name: str, *options: str) -> Callable[[Work], ItemTable]:
    def make(work: Work) -> ItemTable:
        chosen = {option: getattr(work.options, option) for option in options}
        how: dict[str, Any] = {"out": work.journals, "progress": work.progress, "settings": work.settings}
        found = scored_table(name, work.scorer, work.items, **how, **chosen)
        return found.table

    return make


def _documents(path: Path, options: SuiteOptions) -> Sequence[Document]:
    """Documents of the user's text, or pages of Wikipedia, drawn at random."""
    if options.text is None:
        from fairhead.data.bold import read_bold

        everything = wikipedia_documents(read_bold(path))
        if not everything:
            raise InputError(f"{path} has no Wikipedia texts; give a text file for perplexity and attention entropy")
    else:
        everything = text_documents(Path(options.text))
    wanted = min(options.documents, options.documents if options.limit is None else options.limit)
    return sample(everything, wanted, options.seed)


def text_documents(path: Path) -> list[Document]:
    """The paragraphs of a text file, as documents.

    Raises:
        InputError: it cannot be read, or is not text.
    """
    try:
        texts = split_documents(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text in UTF-8; a plain text file is expected") from None
    if not texts:
        raise InputError(f"{path} has no text; paragraphs with empty lines between them are expected")
    return [Document(f"paragraph {i}", text) for i, text in enumerate(texts, start=1)]


def _some_documents(path: Path, options: SuiteOptions) -> Sequence[Document]:
    return _documents(path, options)[: options.attention_documents]


def _perplexity(work: Work) -> ItemTable:
    from fairhead.language.benchmarks import perplexity

    with Journal(journal_path(work.journals, "perplexity", work.settings), work.settings) as journal:
        return perplexity.table(work.scorer, work.items, work.options.window, journal, work.progress)


def _entropy(work: Work) -> ItemTable:
    from fairhead.language import entropy

    return entropy.table(work.scorer, work.items, progress=work.progress)


def _pairs(path: Path, options: SuiteOptions) -> Sequence[Any]:
    from fairhead.language.benchmarks.attention_gap import sentence_pairs

    return sentence_pairs(_items("crows_pairs")(path, options))


def _attention_gap(work: Work) -> ItemTable:
    from fairhead.language.attention_pairs import read_gaps
    from fairhead.language.benchmarks import attention_gap

    return attention_gap.table(read_gaps(work.scorer, work.items, progress=work.progress))


def _bold(work: Work) -> ItemTable:
    """Continue the prompts, then measure: the former needs a model, the latter only the journal."""
    from fairhead.language.benchmarks import bold
    from fairhead.language.generation import generate
    from fairhead.language.generations import GenerationJournal, Sampling
    from fairhead.language.lexicons import find_lexicons

    sampling = Sampling(seed=work.options.seed, batch_size=work.options.bold_batch)
    settings = {**work.settings, **sampling.settings()}
    path = journal_path(work.journals, "bold", settings)
    with GenerationJournal(path, settings) as journal:
        found = generate(work.scorer, bold.prompts(work.items), sampling, journal=journal, progress=work.progress)
    if find_spec("vaderSentiment") is None:
        raise NotMeasured(
            f"continued, not measured: vaderSentiment is not installed here. Where it is: fairhead lm bold --data BOLD "
            f"--lexicons LEXICONS --score-only {path} --out {work.journals.parent}"
        )
    gauges = [bold.sentiment(), bold.gender_words()]
    if work.options.lexicons is not None:
        gauges += [bold.by_lexicon(lexicon) for lexicon in find_lexicons(work.options.lexicons).values()]
    return bold.table(work.items, found, gauges)


class NotMeasured(FairheadError):
    """A benchmark whose answers are kept, but whose figures cannot be made on this machine."""


ENTRIES = (
    Entry("stereoset", "stereoset", "stereoset", _items("stereoset"), _scored("stereoset", "inter"), ("inter",)),
    Entry("crows", "crows_pairs", "crows_pairs", _items("crows_pairs"), _scored("crows_pairs")),
    Entry("bbq", "bbq", "bbq", _items("bbq"), _scored("bbq", "prompt"), ("prompt",)),
    Entry("winobias", "winobias", "winobias", _items("winobias"), _scored("winobias")),
    Entry("perplexity", "perplexity", "bold", _documents, _perplexity, ("window",), reads_text=True, min_items=1),
    Entry("attention", "attention_entropy", "bold", _some_documents, _entropy, reads_text=True, min_items=1),
    Entry("attention", "attention_gap", "crows_pairs", _pairs, _attention_gap),
    Entry("bold", "bold", "bold", _items("bold"), _bold, ("lexicons", "bold_batch", "seed")),
)
