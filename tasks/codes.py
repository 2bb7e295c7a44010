"""Every message that a user may meet, by its code: what it means, whence it comes and how it is mended.

    reason ("bad_role", as it is raised and counted) ─CODES─▶ E207, exit code, meaning, cause, fix ─▶ docs/errors.md

A code is for one kind of problem, wherever it is found. It is never given to another, so that a search for it, or a
script that asks for it, finds the same tomorrow. The hundreds say where to look: 1 config and command line,
2 conversations, 3 sources, 4 tokenizer and template, 5 corpus, 6 training, 7 machine and storage.
"""

from __future__ import annotations

from typing import NamedTuple

USAGE, DATA, MISSING, PART, BUG, STORAGE, BUSY, DIFFERS = 64, 65, 66, 69, 70, 74, 75, 104

# The classes of tasks.errors give them; of sysexits.h but for the last, which is that of `reprotest` and its like.
EXITS = {
    0: "done",
    USAGE: "the config or the command line is wrong",
    DATA: "the data cannot be used as it is",
    MISSING: "a file that is named is not there",
    PART: "a library or a part of the machine is missing",
    BUG: "a fault of the program itself",
    STORAGE: "reading or writing failed",
    BUSY: "another run is at work, or this one was interrupted: the same command goes on",
    DIFFERS: "made again, a corpus is not the same bytes",
}

GROUPS = {
    "1": "Config and command line",
    "2": "Conversations",
    "3": "Sources",
    "4": "Tokenizer and template",
    "5": "Corpus",
    "6": "Training",
    "7": "Machine and storage",
}


class Code(NamedTuple):
    """One kind of problem. `exit` is what the command ends with; for a reject, where it stops the run."""

    code: str
    reason: str
    exit: int
    meaning: str
    cause: str
    fix: str


# fmt: off
_ALL = [
    Code("E101", "bad_command_line", USAGE, "The command line cannot be read.",
         "an option is unknown, lacks its value or does not go with another", "see --help of the command"),
    Code("E102", "config_missing", MISSING, "The config is not there.",
         "the path is mistyped, or relative to another folder", "name it with --config FILE"),
    Code("E103", "bad_config_file", USAGE, "The config is no YAML file of settings.",
         "a slip in its syntax, or another file was named", "mend the line that is named"),
    Code("E104", "bad_setting", USAGE, "A setting has a name or a value that is not known.",
         "it is mistyped, or out of its range", "take what the message offers; docs/config.schema.json lists all"),
    Code("E105", "config_unknown", USAGE, "Nothing says where the config of a corpus lies.",
         "run.json, which records it, is missing or damaged", "name it with --config FILE"),
    Code("E106", "config_folder_missing", MISSING, "The folder in which the paths of the config begin is gone.",
         "the config was moved or deleted since the corpus was made", "name it with --config FILE"),

    Code("E201", "not_an_object", DATA, "A record is no JSON object.",
         "the line holds a list, a string or a number", "write one object with keys for each conversation"),
    Code("E202", "bad_type", DATA, "A value is of another type than its format has there.",
         "such as a string where a list of messages is expected", "write it as the format has it"),
    Code("E203", "missing_key", DATA, "A key that the format needs is missing or null.",
         "another spelling of it, or a record of another format", "say with columns: which key holds what"),
    Code("E204", "empty", DATA, "A conversation has no messages.",
         "an empty list, or a tree without a reply", "take the record out"),
    Code("E205", "bad_content", DATA, "The content of a message is no text.",
         "null without tool calls, a number, or a part that is no text", "write it as a string or as parts of text"),
    Code("E206", "bad_weight", DATA, "The weight of a message is neither 0 nor 1.",
         "weights in between are not supported", "round it, or leave it out"),
    Code("E207", "bad_role", DATA, "The role of a message is not known.",
         "it is mistyped, or a name of another tool's", "take the role that the message offers"),
    Code("E208", "bad_tool_call", DATA, "A tool call cannot be read.",
         "its type, name, id or arguments are not as in the chat format", "write it as {name, arguments}"),
    Code("E209", "bad_tools", DATA, "The list of tools cannot be read.",
         "it is no list of objects", "write it as a list of JSON Schemas"),

    Code("E211", "bad_json", DATA, "A record is no JSON.",
         "a slip in its syntax, NaN or Infinity, or a file that was cut", "mend or remove the line that is named"),
    Code("E212", "bad_utf8", DATA, "A record is not UTF-8.",
         "another encoding, or damaged bytes", "convert the file, or mend the byte that is named"),
    Code("E213", "lone_surrogate", DATA, "A string holds half of a UTF-16 pair.",
         "text was cut in the middle of a character such as an emoji", "remove the half"),
    Code("E214", "nul", DATA, "A record holds a NUL character.",
         "binary data, or a damaged file", "remove it"),
    Code("E215", "too_deep", DATA, "A record is nested too deeply.",
         "hundreds of brackets in one another", "remove the record"),
    Code("E216", "duplicate_key", DATA, "A key stands twice in one object.",
         "whoever wrote it put two values under one name", "leave one of them"),
    Code("E217", "big_integer", DATA, "An integer does not fit into 64 bits.",
         "such numbers are read as others without a word", "write it as a string"),
    Code("E218", "too_long_record", DATA, "A record has more bytes than max_record_bytes.",
         "line ends are missing, or a conversation is huge", "split it, or raise max_record_bytes"),
    Code("E219", "bad_csv", DATA, "A row of a CSV or TSV file has not as many cells as the header.",
         "a separator or quote within a cell is not quoted", "quote the cell"),

    Code("E220", "bad_value", DATA, "A value of a Parquet or Arrow file cannot be read.",
         "a type that has no counterpart in JSON, or damage", "write the column as text"),

    Code("E231", "template_refused", DATA, "The template refuses a conversation.",
         "it raises an exception, such as for two user turns in a row", "mend the record, or take another template"),
    Code("E232", "template_failed", DATA, "The template fails on a conversation.",
         "it takes for granted what this one does not have", "mend the record or the template"),
    Code("E233", "too_long_text", DATA, "The template writes a text that is too long.",
         "it repeats what a conversation holds many times over", "mend the record or the template"),
    Code("E234", "too_many_turns", DATA, "A conversation has too many turns to be located by renderings.",
         "the template has no {% generation %} marks", "add the marks to the template"),
    Code("E235", "no_private_character", DATA, "A conversation uses every private character of Unicode.",
         "one is needed to find the text in what a template writes", "take the record out"),
    Code("E236", "no_trained_tokens", DATA, "A conversation has no token to train on.",
         "no turn is trained on, its answers are empty, or all of them lie beyond the end of the row",
         "see train_on; a larger sequence_length keeps what was cut"),
    Code("E237", "other_text", DATA, "The template does not give the text that a row of format 2.0 holds.",
         "other versions of the template or its libraries than the corpus was made with", "make the corpus again"),

    Code("E251", "too_many_rejects", DATA, "More conversations were rejected than max_rejects allows.",
         "see the code of each", "mend the data, or raise max_rejects to go on without them"),
    Code("E252", "nothing_to_pack", DATA, "No conversation is left to pack.",
         "all were rejected, or dropped as longer than a row", "see rejects.jsonl, sequence_length and overlong"),
    Code("E253", "too_long_conversation", DATA, "A conversation is longer than a row, and overlong is error.",
         "sequence_length is too small for it", "raise sequence_length, or choose truncate, drop or split"),

    Code("E301", "source_missing", MISSING, "A source is not there.",
         "the path is mistyped; it begins at the folder of the config", "mend the path in sources"),
    Code("E302", "no_match", MISSING, "A glob matches no file.",
         "its pattern or folder is mistyped, or the files have another ending", "mend the pattern in sources"),
    Code("E303", "empty_folder", MISSING, "A folder of sources holds no file.",
         "the data lies elsewhere, or was not fetched", "mend the path in sources"),
    Code("E304", "not_a_file", DATA, "A source is neither a file nor a folder.",
         "a device, a socket or a broken link", "name the file itself"),
    Code("E305", "unknown_container", DATA, "The name of a file does not say what it holds.",
         "an ending that is not known", "rename it, or narrow the path"),
    Code("E306", "bad_saved_data", DATA, "A data set of `save_to_disk` cannot be read.",
         "it has several splits, or its state.json is damaged", "name one split, or save it again"),
    Code("E307", "source_twice", USAGE, "Two sources lead to the same file and read it differently.",
         "two patterns overlap", "leave one of the two out"),
    Code("E308", "own_output", USAGE, "A source is what a run wrote.",
         "the path takes in data/ or manifests/", "narrow the path"),
    Code("E309", "bad_file_name", USAGE, "The name of a source is not UTF-8.",
         "it was written by a system with another encoding", "rename the file"),

    Code("E310", "empty_source", DATA, "A source holds no record.",
         "it is empty, or holds blanks or a header alone", "leave it out of sources, or fetch it anew"),
    Code("E311", "packed_twice", DATA, "A compressed file is of a kind that is packed inside.",
         "Parquet and Arrow files compress by themselves", "unpack it"),
    Code("E312", "wrong_encoding", DATA, "A file is UTF-16 or UTF-32.",
         "it was saved so by an editor or a spreadsheet", "convert it with iconv"),
    Code("E313", "unknown_json", DATA, "A JSON file is no list of records.",
         "it is one object, or something else", "write one record a line"),
    Code("E314", "bad_json_array", DATA, "A JSON array does not end where the file ends.",
         "the file was cut, or holds something behind the array", "fetch it anew, or mend its end"),
    Code("E315", "too_large_json", DATA, "A JSON array is too large to be read as a whole.",
         "an array has to be in memory", "write one record a line"),
    Code("E316", "unknown_format", DATA, "The format of the records cannot be told.",
         "their keys are those of no format that is known", "name it with format:, or the keys with columns:"),
    Code("E317", "bad_csv_file", DATA, "A CSV or TSV file cannot be read on.",
         "a quote is left open, or two columns have one name", "mend the line that is named"),
    Code("E318", "too_long_line", DATA, "A line of a CSV or TSV file is longer than max_record_bytes.",
         "a quote is left open, or line ends are missing", "mend the line, or raise max_record_bytes"),
    Code("E319", "unreadable_source", DATA, "A Parquet or Arrow file cannot be read.",
         "it is damaged, cut, or of another kind", "fetch it anew"),

    Code("E320", "bad_compression", DATA, "A compressed file is damaged.",
         "it was cut or changed on its way, or is not what its name says", "fetch it anew"),
    Code("E321", "input_changed", DATA, "A source changed while it was read.",
         "something writes to it", "run again when it is complete"),
    Code("E322", "bomb", DATA, "A source unpacks to far more than its size lets expect.",
         "it is damaged, repeats one thing, or was made to harm", "leave it out, or name it unpacked, as JSONL"),

    Code("E401", "tokenizer_missing", MISSING, "The tokenizer is not there.",
         "the path is mistyped, or names a hub", "name a .model, a tokenizer.json or a folder with one"),
    Code("E402", "bad_tokenizer", DATA, "The tokenizer cannot be read.",
         "it is damaged, cut, or of another kind", "fetch it anew"),
    Code("E403", "unknown_tokenizer", USAGE, "A file is no tokenizer by its name.",
         "it ends in neither .model nor .json", "name the tokenizer itself"),
    Code("E404", "no_such_token", USAGE, "The tokenizer lacks a token that is needed.",
         "it names no EOS or padding, or the setting is mistyped", "set eos_token or pad_token to one of its tokens"),
    Code("E405", "unwritable_text", DATA, "The tokenizer cannot write a text without a control token.",
         "a character stands for a control token alone", "take it out of the data or the tokenizer"),
    Code("E406", "engine_refused", USAGE, "The engine that is asked for cannot stand in for the tokenizer.",
         "it does not read its kind, or gave other tokens", "leave engine out of the config"),
    Code("E407", "untrainable_tokenizer", DATA, "No tokenizer could be trained on the sources.",
         "they hold too little text, or vocab_size does not suit it", "see vocab_size, or name a tokenizer"),

    Code("E411", "template_missing", MISSING, "The template is neither built in nor a file.",
         "the name or the path is mistyped", "take a built-in one, or mend the path"),
    Code("E412", "no_chat_template", USAGE, "The tokenizer has no chat template of its own.",
         "it is of a base model, or trained here", "take a built-in one, or a Jinja file"),
    Code("E413", "bad_template_file", USAGE, "The template is not UTF-8.",
         "another encoding, or another file was named", "convert it"),
    Code("E414", "bad_template", DATA, "The template cannot be used on any conversation.",
         "it is no valid Jinja, or reaches for files, Python or too much memory", "mend it, or take a built-in one"),
    Code("E415", "template_loops", DATA, "The template does not come to an end.",
         "it loops, or takes far too long", "mend it, or take a built-in one"),
    Code("E416", "template_died", DATA, "The template ended the process that rendered it.",
         "it takes too much memory, or found a fault of the interpreter", "mend it, or take a built-in one"),
    Code("E417", "turn_not_located", DATA, "A turn cannot be found in what the template writes.",
         "the template rewrites what came before it", "add {% generation %} marks, or take a built-in one"),

    Code("E501", "manifest_missing", MISSING, "The manifest is not there.",
         "no corpus was made yet, or it lies elsewhere", "make one: luigi --module pipeline PackCorpus"),
    Code("E502", "bad_manifest", DATA, "A file is no manifest that can be read.",
         "it is of another tool or version, or damaged", "name another, or make the corpus again"),
    Code("E503", "edited_manifest", DATA, "A manifest is not as it was written.",
         "someone edited it, or it was damaged", "packcorpus repair MANIFEST"),
    Code("E504", "path_outside", DATA, "A path of a manifest leads out of its corpus folder.",
         "the manifest was made up", "do not use it"),
    Code("E505", "link_in_corpus", DATA, "A file of a corpus is a link.",
         "someone put a link in its place", "packcorpus repair MANIFEST"),
    Code("E506", "manifests_differ", DATA, "The two copies of a manifest differ.",
         "one of them was replaced", "keep the right one, then: packcorpus repair MANIFEST"),
    Code("E507", "corpus_missing", MISSING, "The folder of a corpus is gone.",
         "it was moved or deleted", "make the corpus again"),
    Code("E508", "file_missing", MISSING, "A file of a corpus is missing.",
         "it was moved or deleted, or a copy was cut short", "packcorpus repair MANIFEST"),
    Code("E509", "wrong_size", DATA, "A file of a corpus has not its recorded size.",
         "a copy was cut short, or something was added", "packcorpus repair MANIFEST"),

    Code("E510", "wrong_digest", DATA, "A file of a corpus has not its recorded SHA-256.",
         "bits were flipped, or it was edited", "packcorpus repair MANIFEST"),
    Code("E511", "foreign_file", DATA, "A file in a corpus folder does not belong to the corpus.",
         "someone put it there", "move it elsewhere"),
    Code("E512", "unreadable_file", DATA, "A file of a corpus is not what it should be.",
         "it is damaged, or of another version", "make the corpus again"),
    Code("E513", "foreign_shard", DATA, "A file belongs to another corpus.",
         "files of two corpora were mixed", "packcorpus repair MANIFEST"),
    Code("E514", "bad_row", DATA, "A row is not as format 3.0 has it.",
         "it was written by something else, or damaged before it was signed", "make the corpus again"),
    Code("E515", "bad_index", DATA, "The index of a corpus does not fit its rows.",
         "it was written by something else, or damaged before it was signed", "make the corpus again"),
    Code("E516", "wrong_count", DATA, "A file does not hold the rows that are recorded.",
         "it was written by something else, or damaged before it was signed", "make the corpus again"),
    Code("E517", "wrong_figure", DATA, "A figure of a manifest is not what its rows give.",
         "it was written by something else, or edited and signed anew", "make the corpus again"),
    Code("E518", "open_ledger", DATA, "The ledger does not close.",
         "something was lost or counted twice: a fault of the program", "report it; nothing was published"),

    Code("E521", "cannot_mend", DATA, "A file of a corpus cannot be put back as it was.",
         "what it was made from has changed", "make the corpus again"),
    Code("E522", "origin_missing", MISSING, "Nothing is left of what a file of a corpus was made from.",
         "sources or tokenizer were deleted", "put them back, or name the config with --config FILE"),
    Code("E523", "origin_changed", DATA, "A corpus cannot be made again as it was.",
         "its sources, config, tokenizer or template have changed", "put them back, or make a new corpus"),
    Code("E524", "not_reproducible", DIFFERS, "Made again, a corpus is not the same bytes.",
         "what it is made from, or the version of a library, has changed", "compare run.json; make a new corpus"),

    Code("E601", "not_trainable", DATA, "These rows cannot be trained on.",
         "they are of another tool or format", "make a corpus with PackCorpus"),
    Code("E602", "unisolated_rows", DATA, "Rows say not where a conversation begins.",
         "they have no position_ids", "pack them with PackCorpus, or allow_unisolated: true"),
    Code("E603", "one_file", USAGE, "One file of a corpus was named.",
         "a shard alone is not trained on", "name the manifest or the folder"),
    Code("E604", "cut_shard", DATA, "A shard has no end.",
         "a copy was cut short", "copy or pack it again"),
    Code("E605", "mixed_shards", DATA, "A folder holds shards of several corpora.",
         "two runs wrote to it", "keep those of one run"),
    Code("E606", "no_rows", DATA, "A split has no rows.",
         "the corpus was made without it", "see validation in the config"),
    Code("E607", "other_versions", DATA, "A corpus of format 2.0 gives other tokens than when it was made.",
         "other versions of template, tokenizer or libraries", "make the corpus again"),

    Code("E611", "model_missing", MISSING, "The base model is not there.",
         "the path is mistyped, or the hub cannot be reached", "name a folder, or a model of the hub"),
    Code("E612", "bad_model", DATA, "The base model cannot be read.",
         "files are missing or damaged", "copy the model anew"),
    Code("E613", "ids_beyond_model", DATA, "The corpus has ids that the model has no embeddings for.",
         "it was packed with another tokenizer", "pack it with the model's"),
    Code("E614", "rows_beyond_model", DATA, "Rows are longer than the model has positions.",
         "sequence_length is too large for it", "pack with a smaller --sequence-length"),
    Code("E615", "other_tokenizer", DATA, "The corpus was made with another tokenizer than the model's.",
         "the base model was exchanged", "pack with that tokenizer"),
    Code("E616", "no_such_layers", DATA, "The model has not the layers that lora_targets names.",
         "its architecture names them otherwise", "lora_targets: all"),
    Code("E617", "wrong_weights", DATA, "Other weights would be trained than the adapter's, in fp32.",
         "the model or a library does not do as it was told", "take the versions of constraints.txt"),
    Code("E618", "leak", DATA, "Conversations of one row see each other.",
         "the attention backend does not isolate them with this model", "take the backend that the message offers"),

    Code("E621", "run_folder_taken", USAGE, "The output folder holds something else.",
         "a run with other settings, or other files", "name another `output`, or delete the folder"),
    Code("E622", "foreign_run", DATA, "The output folder holds a run on another corpus.",
         "the corpus was made anew", "name another `output`, or delete the folder"),
    Code("E623", "foreign_checkpoint", DATA, "A checkpoint was made on another corpus.",
         "the corpus was made anew", "delete it, or name another `output`"),
    Code("E624", "bad_checkpoint", DATA, "A checkpoint is not what was written.",
         "it is damaged, or was edited", "delete it to go on from the one before"),
    Code("E625", "other_ranks", USAGE, "A run cannot go on with another number of rows a step.",
         "the number of GPUs has changed", "train with as many as before, or name another `output`"),
    Code("E626", "loss_diverged", DATA, "The loss is not finite.",
         "the learning rate is too high, or rows are odd", "lower learning_rate; go on from the newest checkpoint"),
    Code("E627", "training_failed", DATA, "The process that trains ended without a message.",
         "it was killed, such as where memory ran out", "run the same command again"),
    Code("E628", "rank_failed", DATA, "A process of the training ended.",
         "its own message says why, or it was killed", "run the same command again"),

    Code("E631", "no_attention", PART, "An attention backend cannot be used here.",
         "the machine, the model or a library lacks what it needs", "attention: sdpa"),
    Code("E632", "out_of_memory", PART, "A row, a batch or the model does not fit into the memory of the device.",
         "rows are too long, or the model is too large", "pack shorter rows, or name a smaller model"),
    Code("E633", "no_nf4", PART, "The model cannot be quantised to NF4.",
         "bitsandbytes is missing, or the model is quantised already", "quantization: none"),
    Code("E634", "no_bf16", PART, "The device does not compute in bf16.",
         "it is too old, or a CPU", "precision: auto"),
    Code("E635", "no_gpu", PART, "A GPU that is asked for, or is there, cannot be used.",
         "the driver, or a torch without CUDA", "make doctor; or train without it: device: cpu"),

    Code("E701", "cannot_read", STORAGE, "A file cannot be read.",
         "rights, or a disk that fails", "mend these, run again"),
    Code("E702", "cannot_write", STORAGE, "A file cannot be written.",
         "a full disk, rights, or a disk that fails", "mend these, run again; what was there before is as it was"),
    Code("E703", "damaged_artefact", STORAGE, "What an earlier run left behind is damaged.",
         "a disk that fails, or someone edited it", "delete the file, run again"),
    Code("E704", "disk_failed", STORAGE, "The disk failed where nothing is expected to.",
         "a full disk, rights, or a disk that fails", "mend these, run again"),

    Code("E711", "busy", BUSY, "Another run is at the same work.",
         "it was started twice", "wait for it, run again"),
    Code("E712", "killed", BUSY, "A worker was killed.",
         "memory ran out, or someone killed it", "run again with fewer --workers"),
    Code("E713", "interrupted", BUSY, "The run was told to stop.",
         "Ctrl-C or SIGTERM", "run the same command again: it goes on"),

    Code("E721", "library_missing", PART, "A library is not installed.",
         "it comes with an extra", "make extras, or pip install it"),

    Code("E791", "bug", BUG, "Something happened that should not.",
         "a fault of the program", "report it, with what PACKCORPUS_DEBUG=1 and the same command show"),
]
# fmt: on

CODES = {code.reason: code for code in _ALL}


def table() -> str:
    """docs/errors.md."""
    lines = [
        "# Errors",
        "",
        "Every message has a code, which stays the same from version to version. Made from `tasks/codes.py` by",
        "`make schemas`.",
        "",
        "| exit code | meaning |",
        "|---|---|",
        *(f"| {number} | {meaning} |" for number, meaning in EXITS.items()),
        "",
        "A conversation that cannot be used (E201 to E249) does not stop the run: it goes to `rejects.jsonl`, and the",
        "run fails at its end (E251) where more were rejected than `max_rejects` allows. All others end the command.",
        "",
        "For machines: `packcorpus --json` prints its result or its error as one JSON object on standard output.",
        "With `PACKCORPUS_JSON=1` in the environment it does so too, and `luigi` and `python -m train` tell each error",
        "as one line of JSON on standard error. `PACKCORPUS_DEBUG=1` shows where an error comes from.",
    ]
    for digit, title in GROUPS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| code | reason | exit | meaning | cause | fix |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {code.code} | `{code.reason}` | {code.exit} | {code.meaning} | {code.cause} | {code.fix} |"
            for code in _ALL
            if code.code[1] == digit
        ]
    return "\n".join(lines) + "\n"
