"""The rest is in pyproject.toml, which cannot say that a folder beside the packages goes into one of them."""

from setuptools import find_packages, setup

RECIPES = ["rge.recipes", "rge.recipes.accelerate", "rge.recipes.data_prep", "rge.recipes.small_models"]

setup(
    packages=[*find_packages(include=["rge*", "eval*", "data_prep*"]), *RECIPES],
    package_dir={"rge.recipes": "recipes"},
    # `pip install -e` puts the clone on the path. By default it adds an import hook, which Python asks after the path: from a
    # folder that holds the clone, `import rge` would find the clone itself, as a namespace package without content.
    options={"editable_wheel": {"mode": "compat"}},
)
