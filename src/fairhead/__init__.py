"""fairhead finds, proves and reduces demographic bias in transformers, at the attention heads where it sits.

Three verbs: **audit** (how large is the gap, how sure are we), **locate** (which heads carry it) and
**mitigate** (a better model to take home). Everything reads and writes one table, `Records`.
Names are imported when first used, so that an audit never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fairhead.audit import Audit as Audit
    from fairhead.audit import Comparison as Comparison
    from fairhead.audit import audit as audit
    from fairhead.audit import compare as compare
    from fairhead.errors import FairheadError as FairheadError
    from fairhead.errors import UnsupportedModel as UnsupportedModel
    from fairhead.heads import tap as tap
    from fairhead.mitigate import DAM as DAM
    from fairhead.models import attach as attach
    from fairhead.models import load as load
    from fairhead.records import Records as Records

# Public name -> the module that defines it.
_PUBLIC = {
    "Audit": "fairhead.audit",
    "Comparison": "fairhead.audit",
    "DAM": "fairhead.mitigate",
    "FairheadError": "fairhead.errors",
    "Records": "fairhead.records",
    "UnsupportedModel": "fairhead.errors",
    "attach": "fairhead.models",
    "audit": "fairhead.audit",
    "compare": "fairhead.audit",
    "load": "fairhead.models",
    "tap": "fairhead.heads",
}

__all__ = [
    "DAM",
    "Audit",
    "Comparison",
    "FairheadError",
    "Records",
    "UnsupportedModel",
    "attach",
    "audit",
    "compare",
    "load",
    "tap",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fairhead' has no attribute {name!r}")
    try:
        value = getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "accelerate"):
            raise
        message = f'fairhead.{name} needs {error.name}, which is not installed: pip install "fairhead[torch]"'
        raise ModuleNotFoundError(message, name=error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
