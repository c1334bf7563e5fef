"""The documentation site: `make docs`."""

import os
import sys
import warnings
from importlib.metadata import version as version_of

import fairhead

sys.path.insert(0, os.path.dirname(__file__))
from method_pages import write_pages

project = "fairhead"
author = "The fairhead authors"
copyright = "the fairhead authors"
release = version_of("fairhead")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "pydata_sphinx_theme"
html_title = "fairhead"
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False, "secondary_sidebar_items": ["page-toc"]}
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build"]
nb_execution_mode = "force"  # every figure of a tutorial is made while the site is built
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_execution_in_temp = True
nb_merge_streams = True
nb_render_markdown_format = "gfm"  # with tables
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "none"
default_role = "code"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
# Tables that commands write into pages begin at the third level, wherever they stand.
suppress_warnings = ["myst.header"]
warnings.filterwarnings("ignore", category=DeprecationWarning)
os.environ["PYTHONWARNINGS"] = "ignore"  # in notebooks: of libraries, about their own display there
os.environ["JUPYTER_COLUMNS"] = os.environ["COLUMNS"] = "100"  # what tables in notebooks have room for

# Imported when first used, which autodoc does not wait for; a verb that is a package too is shown as the function.
for _name in fairhead.__all__:
    _found = getattr(fairhead, _name)
    vars(fairhead)[_name] = getattr(_found, "_function", _found)

write_pages()
