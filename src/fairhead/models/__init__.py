"""Models: loading one with whatever it carries, attaching a method, and building one to be trained."""

from fairhead.models.attached import attach as attach
from fairhead.models.attached import method_of as method_of
from fairhead.models.attached import save as save
from fairhead.models.load import LoadedModel as LoadedModel
from fairhead.models.load import load as load
from fairhead.models.load import open_model as open_model

__all__ = ["LoadedModel", "attach", "load", "method_of", "open_model", "save"]
