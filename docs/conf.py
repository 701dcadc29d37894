"""Settings of the documentation site: `make docs` builds it into docs/_build."""

import sys
from pathlib import Path

import tacit

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "tacit"
author = "The tacit authors"
version = release = tacit.__version__
html_title = f"tacit {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "api_links",
    "plain_docstrings",
]
exclude_patterns = ["_build", "images/*.py"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5f99", "color-brand-content": "#1f5f99"},
    "dark_css_variables": {"color-brand-primary": "#7fb8ea", "color-brand-content": "#7fb8ea"},
}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]

default_role = "py:obj"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"
