"""A recipe: strict, and told where it is wrong."""

import pytest
from build_recipes import read_recipe, write_recipe

from phalanx.config import dump_toml, load_config
from phalanx.data.build.recipe import DataRecipe, SourceTerms, StepTerms, load_recipe
from phalanx.data.build.run import BuildOptions, build_recipe
from phalanx.data.build.steps import STEPS
from phalanx.data.rules import RULES
from phalanx.data.scan import SCANS
from phalanx.data.sources import SOURCES
from phalanx.errors import ConfigError

FIVE_LINES = """tokenizer = { kind = "bpe", vocab_size = 4096 }
[[sources]]
kind = "text"
path = "texts"
licence = "mine"
"""


def test_a_folder_of_files_takes_five_lines(tmp_path):
    path = tmp_path / "folder.toml"
    path.write_text(FIVE_LINES)

    recipe = load_recipe(path)

    assert recipe.source_names == ("text",)
    assert recipe.group_of(0) == "text"
    assert recipe.sources[0].licence == "mine"
    assert recipe.step_names == ("unicode", "exact_duplicates")


@pytest.mark.parametrize("fields", ["", 'fields = ["score"]'])
def test_names_that_no_source_keeps_are_not_taken_for_none(tmp_path, fields):
    """The rule would find the field in no document, and mask nothing."""
    text = FIVE_LINES.replace('kind = "text"', f'kind = "jsonl"\n{fields}')
    step = '[[steps]]\nkind = "pii"\nname = "mask"\nnames_field = "people"\n'
    path = tmp_path / "recipe.toml"
    path.write_text(text + step)

    with pytest.raises(
        ConfigError, match=r"sources\.0\.fields: lacks 'people', in which the step pii looks for names; add it"
    ):
        load_recipe(path)
    path.write_text(FIVE_LINES.replace('kind = "text"', 'kind = "jsonl"\nfields = ["people"]') + step)
    assert load_recipe(path).sources[0].fields == ("people",)


def test_a_resolved_recipe_reads_back_as_itself(tmp_path):
    recipe = read_recipe(tmp_path)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump_toml(recipe))

    assert load_config(resolved, DataRecipe) == recipe


def test_no_source_and_no_step_has_a_key_that_a_recipe_has_for_all_of_them():
    taken = {name: set(line.config.model_fields) & set(SourceTerms.model_fields) for name, line in SOURCES.items()}
    taken |= {name: set(line.config.model_fields) & set(StepTerms.model_fields) for name, line in STEPS.items()}

    assert {name: keys for name, keys in taken.items() if keys} == {}


def test_every_rule_and_scan_may_be_a_step():
    assert set(STEPS) == set(RULES) | set(SCANS)


@pytest.mark.parametrize(
    ("line", "replaced", "message"),
    [
        ('kind = "text"', 'pth = "x"\nkind = "text"', r"sources\.1\.text\.pth: unknown key; did you mean 'path'\?"),
        ('name = "again"', 'licences = "CC0"', r"licences: unknown key; did you mean 'licence'\? choices: consent"),
        ('name = "again"', 'name = "lines"', "sources: two of them have the name 'lines'; give each another name"),
        ('label = "quiet"', 'label = "twice"', "steps: two of them have the name 'twice'; give each another label"),
        ('label = "quiet"', 'label = "empty"', "the label 'empty' is reserved for the account"),
        ('name = "again"', 'name = "../up"', r"String should match pattern"),
        (
            "min_characters = 20",
            "min_character = 20",
            r"length\.min_character: unknown key; did you mean 'min_characters'",
        ),
        ('kind = "text"', 'kind = "tex"', r"found 'tex'; expected one of 'python_manual'"),
    ],
)
def test_a_mistake_is_told_with_its_path_and_the_choices(tmp_path, line, replaced, message):
    path = write_recipe(tmp_path)
    path.write_text(path.read_text().replace(line, replaced))

    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


def test_a_document_cannot_be_released_and_dropped(tmp_path):
    with pytest.raises(ConfigError, match="'a' is in release and in drop"):
        read_recipe(tmp_path, more='[quarantine]\nrelease = ["a"]\ndrop = ["a"]')


def test_excerpts_of_a_text_that_shards_encrypt_are_shown_only_where_they_are_asked_for(tmp_path):
    assert read_recipe(tmp_path).output.excerpt_characters == 300
    assert read_recipe(tmp_path, "output.key=k").output.excerpt_characters == 0
    assert read_recipe(tmp_path, "output.key=k", "output.excerpt=9").output.excerpt_characters == 9


OWN = """
class Words:
    def __init__(self, count):
        self.count = count

    def documents(self):
        for number in range(self.count):
            yield f"a text of its own code, number {number}, long enough to be kept by every step " * 3

    def fingerprint(self):
        return str(self.count)
"""


def test_a_source_of_the_users_own_code_is_pinned_and_read(tmp_path):
    (tmp_path / "words.py").write_text(OWN)
    path = tmp_path / "recipe.toml"
    path.write_text(
        'tokenizer = { kind = "bpe", vocab_size = 260 }\n'
        '[[sources]]\nkind = "words.py:Words"\noptions = { count = 12 }\n'
        f'[output]\nsigner = "{tmp_path}/key"\nvalidation_share = 0.3\n'
    )
    recipe = load_recipe(path)

    end = build_recipe(recipe, tmp_path / "out", BuildOptions(code_home=tmp_path))

    assert recipe.sources[0].kind.startswith("words.py:Words@")
    assert recipe.source_names == ("own",)
    assert end.report["sources"][0]["kept"]["documents"] == 12
