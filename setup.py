"""The rest is in pyproject.toml, which cannot say that a folder beside the packages goes into one of them."""

from setuptools import find_packages, setup

RECIPES = ["rge.recipes", "rge.recipes.accelerate", "rge.recipes.data_prep"]

setup(
    packages=[*find_packages(include=["rge*", "eval*", "data_prep*"]), *RECIPES],
    package_dir={"rge.recipes": "recipes"},
)
