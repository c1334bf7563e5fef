"""Groups that nobody named: clusters of frozen features, what they look like, and how a model treats them.

`features_of` asks an encoder for one vector a row, `discover` finds the clusters. Labels, groups and a model's answers
come in afterwards, to describe what was found: they have no part in finding it.
"""

from fairhead import make_verb

make_verb(__name__)
