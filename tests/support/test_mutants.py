"""The lines that the mutants break are there."""

from support import mutants


def test_each_line_that_a_mutant_breaks_is_in_its_file_once():
    problems = {each.file: mutants.missing(each, mutants.ROOT) for each in mutants.MUTANTS}
    assert {file: problem for file, problem in problems.items() if problem} == {}
