"""``muster submit``: a job from a file, from options, or from a command after ``--``.

A job file is YAML (JSON is YAML); errors name file, line and column. Relative paths are made
absolute here, because the server may run in another directory.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, get_args

import click
import msgspec
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from cli.connection import ATTACHED_SECONDS, connected, python_option
from cli.errors import ExitCode, Misuse
from cli.jobs.lifecycle import watch_to_end
from cli.jobs.show import kind_of, show_logs_and_events, what_runs
from cli.output import Output, ShellPath, Tracebacks, facts, notice_if_slow, show
from muster.client.errors import Invalid
from muster.contracts.errors import InvalidDescription, printable
from muster.contracts.job.engine import Engine
from muster.contracts.job.field_types import VIRTUAL_SHARDS_OF_SCRIPTS
from muster.contracts.job.secrets import plaintext_secrets
from muster.contracts.job.spec import JobSpec
from muster.contracts.location import InvalidLocation, expand_home, parse_location
from muster.contracts.views.job import AgentRequest, JobPlan, JobView
from muster.contracts.views.service import FieldError
from muster.host.code import Script, script_of
from muster.host.programs import callers_python
from muster.host.yaml_files import SIZE_LIMIT_BYTES, YamlFile, reason_of, safe_yaml

_Pairs: TypeAlias = Sequence[tuple[str, str]]

SUFFIXES: Final = (".yaml", ".yml", ".json")
PATH_FIELDS: Final = ("dataset_dir", "checkpoint_dir", "working_dir", "python")

_IMPORTS_MUSTER: Final = re.compile(r"(?m)^\s*(import|from) muster\b")
_IS_ELASTIC: Final = re.compile(r"(?ms)^\s*(import|from) muster(\.| import )torch\b.*\.shards\(\)")
_IMPORTS_DISTRIBUTED: Final = re.compile(
    r"(?m)^\s*(import|from) (torch\b.*\bdistributed|muster\.torch\.(huggingface|lightning))\b"
)

_UNKNOWN_FIELD: Final = "extra_forbidden"  # `type` of a field error of the API


class _WithCommand(click.Command):
    """A command whose arguments after ``--`` are the command of every rank."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            dashes = args.index("--")
            args, ctx.meta[__name__] = args[:dashes], args[dashes + 1 :]
            return super().parse_args(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if type(error) not in (click.UsageError, click.NoSuchOption):
                raise
            hint = "To run a command, write -- before it."
            raise click.UsageError(f"{error.format_message()} {hint}", ctx) from None


def complete_fields(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the fields of a job that start with `incomplete`, ready for a value."""
    names = ("job_id", *JobSpec.__struct_fields__)
    return [f"{name}=" for name in names if name.startswith(incomplete)]


class _Pair(click.ParamType[tuple[str, str]]):
    """A word such as ``NAME=VALUE``; `form` is shown in help and errors.

    A name alone has its value in `inherited`.
    """

    def __init__(self, form: str, inherited: Mapping[str, str] | None = None) -> None:
        self.name = form
        self._inherited = inherited or {}

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        name, equals, text = str(value).partition("=")
        if not equals and name in self._inherited:
            return name, refuse_keys({name: self._inherited[name]})[name]
        if not name or not equals:
            unset = ", or not set here" if self._inherited else ""
            self.fail(f"{value!r} is not {self.name}{unset}", param, ctx)
        return name, text


_VARIABLE: Final = _Pair("NAME[=VALUE]", os.environ)


def read_variables(files: Sequence[str]) -> dict[str, str]:
    """Return the variables of files as for containers, which may have ``export`` and quotes."""
    found = {}
    for file in files:
        for number, line in enumerate(Path(file).read_text("utf-8-sig").splitlines(), 1):
            name, equals, text = line.strip().removeprefix("export ").partition("=")
            if equals and name and not name.startswith("#"):
                found[name] = re.sub(r"^([\"'])(.*)\1$", r"\2", text)
            elif name in os.environ:
                found[name] = os.environ[name]
            elif line.strip() and not line.lstrip().startswith("#"):
                # It may be part of a key, so it is not repeated.
                wanted = "expected NAME=VALUE, or a NAME that is set here"
                raise Misuse(f"{file}, line {number}: {wanted}")
    return refuse_keys(found)


def refuse_keys(variables: dict[str, str]) -> dict[str, str]:
    """Return variables whose values were not typed; raises `Misuse` if one holds a key."""
    for name in plaintext_secrets(variables):
        words = f"looks like a key, which env would show to others: muster secret set {name}, then"
        raise Misuse(f"{name} {words} --secret {name}=file:{name}")
    return variables


@click.command(cls=_WithCommand)
@click.argument(
    "file",
    type=ShellPath(path_type=Path),
    required=False,
    metavar="[FILE] [-- COMMAND...]",
    help="A job in YAML or JSON, or a Python script; its arguments follow --.",
)
@click.option("--id", "job_id", help="The job's id. Default: the server makes one.")
@click.option("--name", help="A name for people.")
@click.option(
    "-n", "--ranks", "world_size", type=int, help="Number of ranks. Default: 4, for a command 1."
)
@python_option
@click.option(
    "--gang",
    "restart_scope",
    flag_value="gang",
    help="If a rank dies, start all again, as torch.distributed (DDP) needs.",
)
@click.option(
    "--elastic",
    "mode",
    flag_value="synchronous",
    help="Ranks of a script with muster.torch train one model, and may die, join and leave.",
)
@click.option(
    "--snapshot",
    "code",
    flag_value="snapshot",
    help="Run a copy of the code as it is now: the files below the script's directory.",
)
@click.option(
    "--resume-from", metavar="JOB[:STEP]", help="Start from a job's checkpoint; STEP may be best."
)
@click.option("--program", help="A program that all ranks train together: file.py:Name.")
@click.option(
    "-e", "--env", type=_VARIABLE, multiple=True, help="A variable of each rank; NAME: as here."
)
@click.option(
    "--secret",
    "secrets",
    type=_Pair("NAME=REFERENCE"),
    multiple=True,
    help="The same, from file:NAME (muster secret) or env:NAME of the server.",
)
@click.option("--env-file", type=ShellPath(), multiple=True, help="Variables: lines NAME=VALUE.")
@click.option(
    "--engine",
    type=click.Choice(get_args(Engine)),
    help="What starts the ranks. Default: the machines that the service knows.",
)
@click.option(
    "--label", "labels", type=_Pair("NAME=VALUE"), multiple=True, help="A label of the job."
)
@click.option(
    "--set",
    "fields",
    type=_Pair("FIELD=VALUE"),
    multiple=True,
    shell_complete=complete_fields,
    help="Any field of a job, with its value in YAML.",
)
@click.option("--dry-run", is_flag=True, help="Check the job and print its plan; do not submit it.")
@click.option("-d", "--detach", is_flag=True, help="Do not watch the job.")
@click.option(
    "--no-logs", is_flag=True, help="Show one line of progress and not the logs; so does -o."
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(Output, case_sensitive=False),
    help="Output format. Default: the id, or the plan as a table.",
)
@click.pass_context
def submit(  # noqa: PLR0913  each option of a command is a parameter
    context: click.Context,
    /,
    *,
    file: Path | None,
    env: _Pairs,
    env_file: Sequence[str],
    secrets: _Pairs,
    labels: _Pairs,
    fields: _Pairs,
    dry_run: bool,
    detach: bool,
    no_logs: bool,
    output: Output | None,
    **flags: Any,  # noqa: ANN401  as click passes them
) -> None:
    """Submit a job and watch it until it ends.

    For example: muster submit job.yaml, or muster submit -n 4 -- python train.py

    Ctrl-C detaches and leaves the job running. The job's id and its logs go to
    standard output, the rest to standard error. Exit code 0 if the job completed, 1 if it
    failed, 8 if it was stopped.
    """
    flags["command"] = context.meta.get(__name__)
    variables = {**read_variables(env_file), **dict(env)}
    if file is not None and file.suffix == ".py":
        flags["command"], file = ["python", str(file), *context.meta.get(__name__, [])], None
    typed = {field: value for field, value in flags.items() if value is not None}
    if not (file or fields or typed.keys() & {"command", "program"}):
        raise click.UsageError("Missing a script or job file, or a command after --.")
    described = JobDescription(
        file=None if file is None else read_job_file(file),
        typed={**typed, **_values(fields)},
        mappings={"env": variables, "secrets": dict(secrets), "labels": dict(labels)},
    )
    body = described.body(Path.cwd())
    names_code = body.get("command") or body.get("program")
    # An image has an interpreter of its own.
    if body.get("python") is None and names_code and body.get("engine") != "kubernetes":
        body["python"] = callers_python({**os.environ, **variables})
    if dry_run:
        with connected() as client, _field_errors(described):
            plan = client.plan(body)
        lines = [*facts(_plan_facts(plan, body)), *_request_lines(plan.request)]
        lines.append("nothing was submitted: omit --dry-run to submit")
        show(output or Output.TABLE, msgspec.to_builtins(plan), lines, [plan.job_id])
    else:
        with_logs = not no_logs and output is None
        sys.exit(_submit(described, body, output, detach=detach, with_logs=with_logs))


def _submit(
    described: JobDescription,
    body: dict[str, Any],
    output: Output | None,
    *,
    detach: bool,
    with_logs: bool,
) -> ExitCode:
    with connected(ATTACHED_SECONDS) as client:
        with (
            _field_errors(described),
            notice_if_slow(
                "the API has not accepted the job yet (it may wait for its database or the object "
                "store); retrying for up to a minute"
            ),
        ):
            answer = client.order(body)
        job = client.job_of(answer.read_as(JobView))
        show(output or Output.NAME, answer.read_as(object), [f"{job.id} is {job.status}"], [job.id])
        place = f"{job.view.spec['checkpoint_dir']}/{job.id}"
        for note in _notes(job.view.spec, job.view.message, place):
            click.echo(printable(f"note: {note}"), err=True)
        tracebacks = Tracebacks()
        wait = partial(job.wait, progress=True)
        watch = partial(show_logs_and_events, job, tracebacks) if with_logs else wait
        code = ExitCode.OK if detach else watch_to_end(job, watch, tracebacks.shorten)
    if code is not ExitCode.INTERRUPTED:  # then watch_to_end has printed how to continue
        click.echo(f"Logs: muster logs -f {job.id}", err=True)
    return code


def _notes(spec: Mapping[str, Any], message: str | None, place: str | None) -> Iterator[str]:
    """Yield what the user should know: the API's message, advice, and where checkpoints go."""
    if message:
        yield message
    found = script_of(spec["command"], None, spec["working_dir"])
    script, text = (found.word if found else ""), text_of(found)
    is_elastic = spec["mode"] == "synchronous"
    if not is_elastic and _IS_ELASTIC.search(text):
        yield f"{script} uses muster.torch: use --elastic, so that all ranks train one model"
    elif spec["world_size"] > 1 and spec["restart_scope"] != "gang" and not is_elastic:
        if _IMPORTS_DISTRIBUTED.search(text):
            yield f"{script} uses torch.distributed: use --gang, so that all restart if one dies"
        elif has_separate_models(text):
            yield (
                f"unless it uses torch.distributed, each of the {spec['world_size']} ranks trains "
                "its own model; for one model use --program, or --gang with torch.distributed"
            )
    # The checkpoints of any other command are its own.
    if place and (not spec["command"] or _IMPORTS_MUSTER.search(text)):
        yield f"checkpoints go to {place}"


def has_separate_models(text: str) -> bool:
    """Return whether each rank of this script seems to train a model of its own."""
    return bool(_IMPORTS_MUSTER.search(text)) and not _IMPORTS_DISTRIBUTED.search(text)


def text_of(script: Script | None) -> str:
    """Return the beginning of a script; empty if there is none here."""
    with suppress(OSError), open(script.file if script else "", errors="replace") as file:  # noqa: PTH123
        return file.read(SIZE_LIMIT_BYTES)
    return ""


@contextmanager
def _field_errors(described: JobDescription) -> Iterator[None]:
    """Print the fields that the API refuses, with their places in the file, and exit."""
    try:
        yield
    except Invalid as error:
        refuse(described.error_lines(error.errors) or [f"muster: {error}"])


def refuse(lines: Sequence[str]) -> NoReturn:
    for line in lines:
        click.echo(printable(line), err=True)
    sys.exit(ExitCode.USAGE)


def _values(fields: _Pairs) -> dict[str, Any]:
    values = {}
    for field, text in fields:
        try:
            values[field] = safe_yaml().load(text)
        except (YAMLError, ValueError) as error:
            reason = reason_of(error) if isinstance(error, MarkedYAMLError) else error
            message = f"--set {field}: {text!r} is invalid YAML: {reason}"
            raise click.BadParameter(message) from error
    return values


def _plan_facts(plan: JobPlan, body: Mapping[str, object]) -> Iterator[tuple[str, str | None]]:
    yield "job", plan.job_id
    yield "ranks", f"{plan.world_size}, {kind_of(plan.spec)}"
    yield "runs", what_runs(plan.spec)
    engine = plan.request.engine
    yield "started by", "processes of this machine" if engine == "local" else engine
    yield "python", plan.spec.get("python")
    yield "working in", plan.spec.get("working_dir") or None
    # A command may ignore our data set, so the default is not worth a line.
    if "dataset_dir" in body or not plan.command:
        yield "dataset in", plan.spec.get("dataset_dir") or None
    yield "checkpoint in", plan.spec.get("checkpoint_dir") or None
    yield "code", "a copy, as it is at submission" if plan.spec["code"] == "snapshot" else None
    if plan.shards_per_rank is not None:
        least, most = min(plan.shards_per_rank), max(plan.shards_per_rank)
        per_rank = f"{most}" if least == most else f"{least} to {most}"
        yield "shards", f"{plan.shards}: {per_rank} for each rank"
    for note in _notes(plan.spec, plan.message, None):
        yield "note", note


def _request_lines(request: AgentRequest) -> Iterator[str]:
    """Yield what another engine gets; for an agent on this machine -o json has it."""
    if request.engine != "local":
        yield f"\n{request.engine} gets for the first agent, with secrets and addresses as <words>:"
        if request.command is not None:
            yield f"\n{shlex.join(request.command)}"
        content = request.content
        yield "\n" + (content if isinstance(content, str) else json.dumps(content, indent=2))


def read_job_file(path: Path) -> YamlFile:
    """Return the fields of a job; raises `InvalidDescription`, or `Misuse` for another file."""
    if path.suffix not in SUFFIXES:
        raise Misuse(
            f"{path} is not a job file ({', '.join(SUFFIXES)}); to run a command, write -- before "
            f"it: muster submit -- {'bash ' * (path.suffix == '.sh')}{shlex.quote(str(path))}"
        )
    found = YamlFile.read(path)
    if not isinstance(found.content, dict):
        raise InvalidDescription(f"{path}:1:1: expected fields of a job, such as world_size: 4")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """All fields of a job that a person gave; the command line takes precedence over the file."""

    file: YamlFile | None
    typed: Mapping[str, Any]
    mappings: Mapping[str, Mapping[str, str]]
    """`env`, `secrets` and `labels` from the command line, which are added to those of the file."""

    def body(self, directory: Path) -> dict[str, Any]:
        """Return the request body; paths are relative to `directory`.

        A command or program runs there as well, unless `working_dir` is given.
        """
        body = {**(self.file.content if self.file else {}), **self.typed}
        for field, typed in self.mappings.items():
            given = body.get(field) or {}
            if typed and isinstance(given, Mapping):  # the server refuses any other type
                body[field] = {**given, **typed}
        if self.typed.get("command"):  # as `muster run`; a file means what REST means
            body.setdefault("world_size", 1)
            if body.get("mode") == "synchronous":
                shards = body.setdefault("virtual_shards", VIRTUAL_SHARDS_OF_SCRIPTS)
                if isinstance(body["world_size"], int) and isinstance(shards, int):
                    # More ranks than shards would have nothing to compute.
                    body.setdefault("max_workers", max(body["world_size"], shards))
        if body.get("working_dir") is None and (body.get("command") or body.get("program")):
            body["working_dir"] = str(directory)
        for field in PATH_FIELDS:
            path = body.get(field)
            with suppress(InvalidLocation):  # the server refuses it
                if isinstance(path, str) and isinstance(parse_location(path), Path):
                    # Unlike Path.resolve, abspath treats links and ".." as a shell does.
                    body[field] = os.path.abspath(directory / expand_home(path))  # noqa: PTH100
        return body

    def error_lines(self, errors: Sequence[FieldError]) -> list[str]:
        """Return a line per invalid field: those of the file in its order, then the others."""
        found = []
        for error in errors:
            location = error.loc[1:]  # after "body"
            field = ".".join(map(str, location)) or str(error.loc[0])
            hint = error.hint
            if error.type == _UNKNOWN_FIELD:
                hint = hint or "muster schema lists the fields"
            at, position = "muster", (sys.maxsize, 0)
            if self.file and location and location[0] in self.file.content.keys() - self.typed:
                position = self.file.position(location)
                at = ":".join(map(str, (self.file.name, *position)))
            found.append((position, f"{at}: {field}: {error.msg}" + (f" ({hint})" if hint else "")))
        return [line for _, line in sorted(found, key=itemgetter(0))]
