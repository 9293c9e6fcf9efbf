"""The part of `fold` that concerns the code of a job: whether all ranks run the same. Pure.

A file that was not known is part of the job from the first rank on that has it. Files that no rank
reports, such as other scripts of the same directory, are never compared.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from coordinator.decide import fold_exit
from coordinator.decide.actions import CodeTaken
from coordinator.decide.state.job import JobSnapshot
from coordinator.decide.state.job_end import JobFailure
from coordinator.decide.state.rank import Cause, RankSnapshot
from muster.contracts.job.status import Reason


def take(snapshot: JobSnapshot, taken: CodeTaken) -> JobSnapshot:
    """Take the code as it is; what was known before is reported where it differs and is used."""
    before, files = snapshot.code.files, {**snapshot.code.files, **taken.files}
    edited = {path: digest for path, digest in before.items() if files[path] != digest}
    code = replace(snapshot.code, files=files, edited=edited)
    return _use(replace(snapshot, code=code), [taken.script])


def compare(
    snapshot: JobSnapshot, rank: RankSnapshot, files: Mapping[str, str], now: float
) -> JobSnapshot:
    """Compare the code of a rank with that of its job, and refuse the rank where it has to be."""
    code, agent = snapshot.code, snapshot.agent_of(rank)
    known = code.files
    other = {path: digest for path, digest in files.items() if known.get(path, digest) != digest}
    if not other:
        if files.items() - code.files.items():
            code = replace(code, files={**code.files, **files})
        return _use(replace(snapshot, code=code), files)
    what, name = _describe(code.files, other), snapshot.rank_name(rank)
    if not snapshot.spec.is_code_bound:
        note = f"{name} has other code than its job, and goes on: {what}"
        code = replace(code, files={**code.files, **files}, note=note)
        return replace(snapshot, code=code)
    if rank.attempt.refused is not None:
        return snapshot
    words = f"has other code than the job: {what}"
    refused = Cause(reason=Reason.CODE_CHANGED, message=words)
    if not agent.has_code and snapshot.has_other_host(rank):  # an old copy
        host = snapshot.host_name(rank.host)
        words = f"was refused, as {host} {words}. That host is not used any more"
        snapshot = fold_exit.set_host_aside(snapshot, rank, replace(refused, message=words))
        return replace(snapshot, code=replace(code, note=f"rank {rank.rank} {words}"))
    ways = (
        f"Restore the file and resume (resume_from: {snapshot.job_id}), or resume with the edited "
        "one; then code: any makes later edits events, and --snapshot runs a copy"
    )
    message = f"{name} has other code than its job: {what}. {ways}"
    failure = JobFailure(reason=Reason.CODE_CHANGED, message=message)
    snapshot = snapshot.with_attempt(rank, replace(rank.attempt, refused=refused))
    return snapshot.fail(failure, now)


def _describe(before: Mapping[str, str], files: Mapping[str, str]) -> str:
    path = min(files)
    more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
    return f"{path} (sha256 {files[path]}, was {before[path]}){more}"


def _use(snapshot: JobSnapshot, files: Iterable[str]) -> JobSnapshot:
    """Note that these files are used: an edit before the start is reported once."""
    code = snapshot.code
    if not (met := code.edited.keys() & files):
        return snapshot
    what = _describe(code.edited, {path: code.files[path] for path in met})
    note = f"edited before this start, which takes it as it is: {what}"
    edited = {path: code.edited[path] for path in code.edited.keys() - met}
    return replace(snapshot, code=replace(code, edited=edited, note=note))
