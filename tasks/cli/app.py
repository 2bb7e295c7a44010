"""The `packcorpus` command.

    packcorpus init PATH…                       packcorpus check CONFIG | DATA…
    packcorpus pack CONFIG | DATA…              packcorpus train [CORPUS] [OPTION…]
    packcorpus part CONFIG --stage NAME --share I/N
    packcorpus inspect [PATH] [--row N] [--at FILE:LINE] [--search TEXT] …
    packcorpus list                             packcorpus diff BEFORE AFTER
    packcorpus verify [MANIFEST] [--rebuild]    packcorpus repair [MANIFEST]
    packcorpus report [MANIFEST] [--output FILE]
    packcorpus export [MANIFEST] --to FORMAT [--output FOLDER]
    packcorpus push MANIFEST OWNER/NAME [--private] [--revision BRANCH]
    packcorpus certify RUN [--merged FOLDER]    packcorpus clean [--yes]
    packcorpus skill

With --json, a command prints one JSON object on standard output: the value that it would otherwise render as text, or
{"error": …} (docs/reference/errors.md).

Parameters are the arguments and options of a command, and its docstring is the help. A command imports Arrow, numpy,
and tokenizers only if it needs them, so that --help is immediate.
"""

from __future__ import annotations

from packcorpus.tasks.core import startup  # before all else

# isort: split
import shlex
import sys
from dataclasses import replace as changed
from pathlib import Path
from typing import Annotated, Any

import typer

from packcorpus.tasks.cli.options import (
    DEFAULT_CONFIG,
    ConfigArgument,
    ConfigOption,
    ConfigOrDataArgument,
    DraftedLengthOption,
    JsonOption,
    ManifestArgument,
    NameOption,
    RootOption,
    SequenceLengthOption,
    TemplateOption,
    TokenizerOption,
    default_config,
    manifest_argument,
    number,
    option,
    positive,
    print_lines,
    print_view,
    value_as_json,
)
from packcorpus.tasks.core.error_codes import DATA
from packcorpus.tasks.core.errors import Interrupted, UsageError
from packcorpus.tasks.core.messages import DEBUG, JSON, as_json, as_text, is_on, to_pack_error
from packcorpus.tasks.core.other_tools import where_to_set
from packcorpus.tasks.inspection.manifests import complete_file, find_damaged, find_file, find_manifest, list_manifests
from packcorpus.tasks.stores.urls import local_path_of

app = typer.Typer(
    help="Pack conversations into training rows; inspect, verify, and train on the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# The exception of click for an invalid command line, which typer does not export.
_BadCommandLine: Any = typer.BadParameter.__base__


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"packcorpus {version('packcorpus')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with each error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def init(
    paths: Annotated[list[str], typer.Argument(metavar="PATH…", show_default=False, help="Files, folders, or globs.")],
    tokenizer: TokenizerOption = "",
    template: TemplateOption = "",
    sequence_length: DraftedLengthOption = "",
    name: NameOption = "",
    full: Annotated[bool, typer.Option("--full", help="Write every setting, with its description.")] = False,
    output: Annotated[Path, typer.Option(metavar="FILE", help="The config to write.")] = DEFAULT_CONFIG,
    format: Annotated[str, typer.Option(metavar="NAME", help="The record format of the files.")] = "auto",
    columns: Annotated[
        list[str] | None,
        option("OURS=YOURS", "A key of the format and its name in the files, such as instruction=ticket; repeatable."),
    ] = None,
    roles: Annotated[
        list[str] | None, option("OURS=YOURS", "A role and its name in the files, such as user=customer; repeatable.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        option("KEY", "A key or content part with images, audio, video, or preference data to ignore; repeatable."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Inspect data files and write a config for them.

    The config has about ten lines: the files, the tokenizer, its template, and a length of rows that 99 % of the
    conversations fit.
    """
    from packcorpus.tasks.cli.data_config import chooser
    from packcorpus.tasks.dry_run.config_draft import settings_of_sources, write_draft
    from packcorpus.tasks.dry_run.given import Given

    of_sources = settings_of_sources(format, columns or (), roles or (), ignore or ())
    given = Given(tokenizer, template, sequence_length, name, of_sources)
    draft = write_draft(paths, output, force, given, full, chooser(json_output))
    next_step = f"{output}: written; next: packcorpus check {shlex.quote(str(output))}"
    summary = draft.summary()
    value = {"config": output, "settings": draft.values, "found": summary, "will_fail": draft.will_fail}
    print_lines(value, [*summary, next_step], json_output)


@app.command()
def check(
    paths: ConfigOrDataArgument = None,
    config: Annotated[Path | None, option("FILE", "Same as CONFIG.", hidden=True, readable=False)] = None,
    tokenizer: TokenizerOption = "",
    template: TemplateOption = "",
    sequence_length: SequenceLengthOption = "",
    name: NameOption = "",
    batch_size: Annotated[
        list[int] | None, option("ROWS", "Rows per step, for the step count; repeatable.", parser=positive)
    ] = None,
    tokens_per_step: Annotated[
        int | None, option("TOKENS", "Tokens per step, instead of --batch-size.", parser=positive)
    ] = None,
    workers: Annotated[
        int | None,
        option("N", "Worker processes, for the time estimate. Default: as for `pack`.", parser=positive),
    ] = None,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Predict the result of a run from a sample of every source.

    It takes seconds and writes nothing. The exit code is 65 if the run would fail. For data without a config, settings
    are those that `pack` would write.
    """
    if paths and config:
        raise UsageError("bad_command_line", f"{paths[0]} and --config {config}: name one config")
    words = [str(config)] if config else list(paths or ())
    from packcorpus.tasks.cli.check_view import show_prediction
    from packcorpus.tasks.cli.data_config import chooser, config_for, find_config
    from packcorpus.tasks.config import load_config
    from packcorpus.tasks.dry_run.dry_run import predict
    from packcorpus.tasks.dry_run.given import Given

    given = Given(tokenizer, template, sequence_length, name)
    config = find_config(words, given)
    if config:
        settings, folder = load_config(config, sequence_length), config.parent
    else:
        (settings, draft), folder = config_for(words, given, root, chooser(json_output)), Path()
        print_lines(None, draft.summary() if draft and not json_output else [], False)
    batches = list(batch_size or [])
    if tokens_per_step:
        batches.append(max(1, tokens_per_step // settings.sequence_length))
    prediction = changed(predict(settings, folder, root, workers or 0, batches=batches), config=config)
    print_view(prediction, show_prediction, json_output)
    if prediction.run_fails:
        raise typer.Exit(DATA)


@app.command()
def pack(
    paths: ConfigOrDataArgument = None,
    tokenizer: TokenizerOption = "",
    template: TemplateOption = "",
    sequence_length: SequenceLengthOption = "",
    name: NameOption = "",
    workers: Annotated[
        int | None, option("N", "Worker processes. Default: one per usable core.", parser=number)
    ] = None,
    root: RootOption = Path(),
    check_sources: Annotated[
        bool, typer.Option("--check-sources", help="Hash every source again, even if it looks unchanged.")
    ] = False,
    on: Annotated[
        str,
        option(
            "ENGINE",
            "The engine that does the work: here, workers, workers:N, ray://auto, or ray://HOST:PORT. "
            "Default: workers.",
        ),
    ] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors and the manifest path.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print progress and errors as lines of JSON.")] = False,
) -> None:
    """Pack the corpus of a config, or of data without one.

    For data, the settings are decided as by `init`, and written to NAME.yaml; the same command uses that file again.
    An interrupted run resumes. If the corpus is complete, the command does nothing. The last line of standard output is
    the path of the manifest. For a config, equivalent to: luigi --module pipeline PackCorpus --config CONFIG
    """
    from packcorpus.tasks.cli import start
    from packcorpus.tasks.cli.data_config import chooser, find_config, write_config
    from packcorpus.tasks.dry_run.given import Given

    given, words = Given(tokenizer, template, sequence_length, name), list(paths or ())
    config = find_config(words, given)
    if not config:
        config, sequence_length = write_config(words, given, root, json_output, quiet, chooser(json_output)), ""
    options = [f"--sequence-length={sequence_length}"] * bool(sequence_length)
    options += [f"--workers={workers}"] * (workers is not None) + ["--check-sources"] * check_sources
    options += [f"--on={on}"] * bool(on)
    start.pack(config, root, [*options, *["--quiet"] * quiet, *["--json"] * json_output])


@app.command()
def part(
    config: ConfigArgument = None,
    stage: Annotated[
        str, option("STAGE", "prepare, tokenize (parts), plan, write (shards), or publish. Run them in this order.")
    ] = "",
    share: Annotated[
        str, option("I/N", "The share of tokenize or write to run, from 1/N to N/N. Default: all of it.")
    ] = "",
    sequence_length: SequenceLengthOption = "",
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Run one stage of `pack`, or a share of it, on one of several machines.

    The machines share files or a bucket. For Slurm arrays, Kubernetes jobs, and xargs: run --stage prepare once,
    tokenize for every share, plan once, write for every share, and publish once. Start each stage after the stage
    before has ended everywhere; a machine that starts too early exits with 75.
    """
    from packcorpus.tasks.cli import start

    value = start.run_part(config or default_config(), root, stage, share, sequence_length)
    name = f"{value['stage']} {value['share']}" if value["share"] else value["stage"]
    counts = f"{name}: {value['steps']:,} of {value['all']:,}, {value['found_done']:,} of them already done"
    print_lines(value, [value.get("manifest", counts)], json_output)


# All options of `train` are passed on, including --help.
@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    options_metavar="[CORPUS] --base-model MODEL [OPTION]...",
)
def train(context: typer.Context) -> None:
    """Train a QLoRA adapter on a corpus.

    CORPUS is a manifest (file, name, or key) or a corpus folder. The default is the corpus of the latest run.
    `packcorpus train doctor` reports what this machine can use for training, `diagnose` which settings train faster,
    `merge RUN` merges an adapter into its base model, and `chat RUN` talks to the result.
    """
    from packcorpus.tasks.cli import start

    start.train(context.args)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    options_metavar="RUN [OPTION]...",
)
def certify(context: typer.Context) -> None:
    """Compare what is served with what was trained, and give one verdict.

    RUN is a training run, as for `packcorpus train merge`. Token ids, the chat template, names of the adapter, stop
    tokens, weights, and logits are compared, also of the merged model if there is one. The exit code is 65 if what is
    served is not what was trained.
    """
    from packcorpus.tasks.cli import start

    start.train(["certify", *context.args])


@app.command()
def inspect(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            show_default=False,
            parser=local_path_of,
            help="A manifest (file, URL, name, or key), corpus folder, shard, source file, or config. "
            "Default: the corpus of the latest run.",
            autocompletion=complete_file,
        ),
    ] = None,
    row: Annotated[int | None, option("N", "Show row N as text; 0 is the first.", parser=number)] = None,
    split: Annotated[
        str | None,
        option("NAME", "The split of --row: train, validation, train_epoch_2, …; train-512 with several lengths."),
    ] = None,
    conversation: Annotated[
        int | None,
        option("N", "Show the conversation with number N in the index (#N in a row).", parser=number),
    ] = None,
    at: Annotated[
        str | None,
        option("FILE:LINE", "Show the conversation of this source line, or of a record's `id` (FILE:ID or ID)."),
    ] = None,
    line: Annotated[
        int | None,
        option("N", "For a source file: show its line (or record) N; 1 is the first.", parser=number),
    ] = None,
    search: Annotated[str | None, option("TEXT", "Show the conversations that contain TEXT.")] = None,
    rejects: Annotated[
        bool, typer.Option("--rejects", help="Show the rejected conversations and the reasons.")
    ] = False,
    limit: Annotated[
        int, typer.Option(parser=positive, metavar="N", help="The maximum number of results to list.")
    ] = 20,
    ids: Annotated[
        bool, typer.Option("--ids", help="With a row or conversation: show token ids and boundaries.")
    ] = False,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Show the figures of a corpus, or its rows and conversations."""
    from packcorpus.tasks.cli.questions import Question, answer, render

    question = Question(row, split, conversation, at, line, search, rejects, limit, ids)
    question.option()  # report options that exclude each other before searching for a manifest
    print_view(answer(find_file(path, root), question, root), render, json_output)


@app.command("list")
def list_command(root: RootOption = Path(), json_output: JsonOption = False) -> None:
    """List all corpora in manifests/."""
    from packcorpus.tasks.cli.corpus_view import show_list

    print_view(list_manifests(root), show_list, json_output)


@app.command()
def diff(
    before: Annotated[Path, manifest_argument("BEFORE")],
    after: Annotated[Path, manifest_argument("AFTER", "The corpus to compare it with.")],
    limit: Annotated[
        int,
        typer.Option(
            parser=positive,
            metavar="N",
            help="List at most N removed and N added conversations; all are counted.",
        ),
    ] = 10_000,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Compare two corpora: settings, figures, and conversations."""
    from packcorpus.tasks.cli.corpus_view import show_difference
    from packcorpus.tasks.inspection.diff import compare

    print_view(compare(find_manifest(before, root), find_manifest(after, root), limit), show_difference, json_output)


@app.command()
def report(
    manifest: ManifestArgument = None,
    output: Annotated[Path | None, option("FILE", "The file to write. Default: next to the corpus folder.")] = None,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Write a shareable, self-contained HTML page about a corpus."""
    path = find_manifest(manifest, root)
    from packcorpus.tasks.report.report import write_report

    written, size = write_report(path, output)
    print_lines({"manifest": path, "report": written, "bytes": size}, [str(written)], json_output)


@app.command()
def verify(
    manifest: ManifestArgument = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Rebuild the corpus in a temporary folder and compare every byte.")
    ] = False,
    config: ConfigOption = None,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Recompute every checksum of a corpus and check every row."""
    if config and not rebuild:
        raise UsageError("bad_command_line", "--config requires --rebuild")
    path = find_manifest(manifest, root)
    from packcorpus.tasks.cli.corpus_view import show_checks
    from packcorpus.tasks.verification.verify import Check
    from packcorpus.tasks.verification.verify import verify as verify_corpus

    checks = verify_corpus(path)
    if rebuild:
        from packcorpus.tasks.verification.rebuild import rebuild as rebuild_corpus

        checks.append(Check("rebuild", rebuild_corpus(path, config)))
    print_view({"manifest": path, "checks": checks}, show_checks, json_output)


@app.command()
def repair(
    manifest: ManifestArgument = None,
    config: ConfigOption = None,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Restore the damaged or missing files of a corpus.

    Restored files have their recorded checksums. Nothing else is changed.
    """
    path = find_damaged(manifest, root)
    from packcorpus.tasks.core.printable import from_here, printable
    from packcorpus.tasks.verification.repair import repair as repair_corpus

    mended = []
    for file in repair_corpus(path, config):
        mended.append(file)
        if not json_output:
            print(printable(from_here(f"repaired {file.path} ({file.why}) from {file.source}")), flush=True)
    lines = [] if mended else ["nothing to repair: all files match the manifest"]
    print_lines({"manifest": path, "mended": mended}, lines, json_output)


@app.command()
def export(
    manifest: ManifestArgument = None,
    to: Annotated[
        str,
        option("FORMAT", "The format: trl, megatron, axolotl, llama-factory, xtuner, olmo-core, mds, or automodel."),
    ] = "",
    output: Annotated[
        Path | None, option("FOLDER", "The folder to write to. Default: data/exports/<corpus>-<format>.")
    ] = None,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Export a corpus to the format of another trainer.

    Prints the settings for the trainer and the limits of the format. If the export is complete, the command does
    nothing.
    """
    from packcorpus.tasks.exports.export import export_corpus

    written = export_corpus(find_manifest(manifest, root), to, output, root)
    print_lines(written, written.lines(), json_output)


@app.command()
def push(
    manifest: Annotated[Path, manifest_argument("MANIFEST")],
    repo: Annotated[
        str,
        typer.Argument(
            metavar="REPO",
            show_default=False,
            help="The dataset: OWNER/NAME, OWNER/NAME/FOLDER, or hf://datasets/OWNER/NAME@BRANCH/FOLDER.",
        ),
    ],
    private: Annotated[bool, typer.Option("--private", help="If the dataset is new, create it as private.")] = False,
    revision: Annotated[
        str, option("BRANCH", "The branch, which is created if it does not exist. Default: main.")
    ] = "",
    message: Annotated[str, option("TEXT", "The commit message. Default: the name and key of the corpus.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace another corpus in the same place.")] = False,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Push a corpus to a dataset on the Hugging Face Hub.

    Uploads the data first, then the dataset card and the manifest. Files that are already on the Hub are not uploaded
    again. Uses the token from HF_TOKEN or `hf auth login`.
    """
    from packcorpus.tasks.core.printable import counted, in_bytes, printable
    from packcorpus.tasks.corpus.push import push_corpus

    def progress(line: str) -> None:
        if not json_output:
            print(printable(line), file=sys.stderr, flush=True)

    path = find_manifest(manifest, root)
    done = push_corpus(
        path, repo, private=private, revision=revision, message=message, replace=replace, report=progress
    )
    news = f"sent {counted(done.sent, 'file')} of {done.files:,}, {in_bytes(done.sent_bytes)}"
    news = "already complete, nothing to do" if done.found_done else news
    print_lines(done, [f"{done.url}: {news}; commit {done.commit}"], json_output)


@app.command()
def clean(
    yes: Annotated[bool, typer.Option("--yes", help="Delete without a question.")] = False,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """List the files in data/ that no corpus uses, and delete them after a question.

    Without a terminal, it only lists, unless --yes is given. Deleted are only files that a run writes again, more
    slowly, and nothing while a run is working. A file is used if a corpus or a manifest of the root names it.

    \b
    tokens      token files, which other lengths and settings reuse
    plans       the place of each conversation in the rows
    digests     checksums of source files
    engines     proofs that the fast encoder gives the same tokens
    tokenizers  tokenizers that runs have trained
    remote      copies of remote source files
    unpacked    parts of source files that a run has unpacked, until it reads them

    Never deleted: data/corpora, data/exports, data/adapters, data/merged, manifests/, and files that packcorpus did not
    write. Tokenizers and models from the Hub are in the Hub's own cache (HF_HOME).
    """
    from packcorpus.tasks.cli.clean_view import in_words, may_delete, show_usage
    from packcorpus.tasks.inspection.unused import delete_unused, find_unused

    usage = find_unused(root)
    unused = usage.unused
    if not json_output:
        print_view(usage, show_usage, json_output)
    wanted = bool(unused.files) and (yes or (not json_output and may_delete(unused)))
    deleted = delete_unused(usage) if wanted else None
    ends = f"nothing was deleted; to delete {in_words(unused)}, run again with --yes"
    if deleted:
        ends = f"deleted {in_words(deleted)}"
    elif not unused.files:
        ends = "nothing to delete"
    print_lines({"usage": usage, "deleted": deleted}, [ends], json_output)


@app.command()
def skill(json_output: JsonOption = False) -> None:
    """Print a page for coding agents: how to prepare a dataset.

    To keep it as a skill: packcorpus skill > .claude/skills/packcorpus/SKILL.md
    """
    page = Path(__file__).with_name("skill.md").read_text(encoding="utf-8")
    print(value_as_json({"page": page}) if json_output else page.rstrip())


# The commands of `packcorpus train`.
OF_TRAINING = ("chat", "diagnose", "doctor", "merge")
# The exit code that typer returns for a KeyboardInterrupt.
_INTERRUPTED = 130


def main() -> None:
    """Run the command line; exit codes follow sysexits.h."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    arguments = sys.argv[1:]
    startup.end()
    try:
        code = app(standalone_mode=False)
        if code != _INTERRUPTED:
            sys.exit(code)
        failure: Exception = Interrupted("interrupted", "interrupted; only the changes reported above were made")
    except _BadCommandLine as error:
        if not arguments:  # the error is the help (no_args_is_help)
            error.show()
            sys.exit(UsageError.exit_code)
        command = error.ctx.info_name if error.ctx and error.ctx.parent else None
        if error.ctx is None and arguments[0] in typer.main.get_group(app).commands:  # an option lacks its value
            command = arguments[0]
        help_command = " ".join(filter(None, ("packcorpus", command, "--help")))
        message = error.format_message().rstrip(".")
        if command is None and arguments[0] in OF_TRAINING:
            help_command = f"packcorpus train {arguments[0]} --help"
            message = f"{message}; did you mean packcorpus train {arguments[0]}?"
        unknown = getattr(error, "option_name", "") if hasattr(error, "possibilities") else ""
        if elsewhere := where_to_set(unknown, "command"):
            message = f"{unknown}: no such option; {elsewhere}"
        failure = UsageError("bad_command_line", f"{message}; see {help_command}")
    except Exception as error:
        if "--debug" in arguments or is_on(DEBUG):
            raise
        failure = error
    reported = to_pack_error(failure)
    if "--json" in arguments or is_on(JSON):
        print(as_json(reported))
    else:
        print(as_text(reported), file=sys.stderr)
    sys.exit(reported.exit_code)


if __name__ == "__main__":
    main()
