"""What is wrong with a text that PyYAML does not take."""

import yaml


def yaml_problem(error: Exception) -> str:
    """Return what reading it has raised, in words, and without the place."""
    match error:
        case yaml.MarkedYAMLError():
            return str(error.problem or error.context)
        case yaml.YAMLError() | ValueError() | RecursionError():
            return str(error)
        case _:  # PyYAML's constructors raise whatever befalls them
            return "a value is not what its tag says"
