//! What a site's own wrapper does to exit codes and signals, told before a job is submitted with it.
//!
//! No shell is parsed: lines are looked at, so a clean result is no proof. What it finds is what cost a lab its records:
//! crashed jobs in accounting as COMPLETED, and saves that were killed with the shell.

/// One finding a line: `line 12: ...`. Empty if nothing is seen.
pub fn lint_wrapper(text: &str) -> Vec<String> {
    let lines: Vec<(usize, &str)> = text
        .lines()
        .enumerate()
        .map(|(index, line)| (index + 1, without_comment(line).trim()))
        .filter(|(_, line)| !line.is_empty())
        .collect();
    let mut found = Vec::new();
    let pipefail = lines.iter().any(|(_, line)| line.starts_with("set ") && line.contains("pipefail"));
    let program = lines.iter().rposition(|(_, line)| runs_the_program(line));
    let Some((at, &(number, line))) = program.and_then(|at| Some((at, lines.get(at)?))) else {
        return vec!["it never runs its arguments (\"$@\"): the program would not start".to_owned()];
    };
    if has_word(line, "eval") {
        found.push(format!("line {number}: eval takes the command apart and puts it together anew: quotes are lost"));
    }
    if has_pipe(line) && !pipefail {
        found.push(format!(
            "line {number}: a pipe without `set -o pipefail`: the exit code is that of its last command"
        ));
    }
    if ["|| true", "|| :", "||true", "; true"].iter().any(|words| line.contains(words)) {
        found.push(format!("line {number}: the exit code of the program is thrown away"));
    }
    if line.ends_with('&') && !line.ends_with("&&") {
        found.push(format!("line {number}: the program runs in the background: the job ends without it"));
    }
    let after = lines.get(at + 1..).unwrap_or_default();
    let ends_with_code =
        after.last().is_some_and(|(_, last)| last.starts_with("exit $") || last.starts_with("exit \"$"));
    if let (Some((next, _)), false) = (after.iter().find(|(_, line)| !closes_a_block(line)), ends_with_code) {
        found.push(format!("line {next}: a command after the program: its exit code takes the place of the program's"));
    }
    if !has_word(line, "exec") && !has_word(line, "srun") {
        found.push(format!(
            "line {number}: a shell stays above the program: SIGTERM ends the shell first, and the program is killed \
             before it has saved; write exec srun \"$@\""
        ));
    }
    found
}

/// Up to a `#` that begins a word outside quotes.
fn without_comment(line: &str) -> &str {
    let (mut quote, mut before) = (None, ' ');
    for (index, c) in line.char_indices() {
        match (quote, c) {
            (None, '#') if before.is_whitespace() => return line.get(..index).unwrap_or(line),
            (None, '\'' | '"') => quote = Some(c),
            (Some(open), c) if c == open => quote = None,
            _ => {}
        }
        before = c;
    }
    line
}

fn runs_the_program(line: &str) -> bool {
    line.split(';').map(str::trim).any(|command| {
        ["$@", "$*", "$1"].iter().any(|words| command.contains(words))
            && !["echo", "printf", "if ", "[ ", "[[ "].iter().any(|start| command.starts_with(start))
            && !is_assignment(command)
    })
}

/// `cmd="$@"`: kept for later.
fn is_assignment(line: &str) -> bool {
    let first = line.split_whitespace().next().unwrap_or_default();
    first.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'))
        && !line.contains(" \"$@\"")
}

fn has_word(line: &str, word: &str) -> bool {
    line.split(|c: char| c.is_whitespace() || ";&|()".contains(c)).any(|part| part == word)
}

fn has_pipe(line: &str) -> bool {
    let bytes = line.as_bytes();
    (0..bytes.len()).any(|at| {
        let near = |index: Option<usize>| index.and_then(|index| bytes.get(index)).copied().unwrap_or_default();
        near(Some(at)) == b'|'
            && near(at.checked_sub(1)) != b'|'
            && near(Some(at + 1)) != b'|'
            && near(at.checked_sub(1)) != b'>'
    })
}

fn closes_a_block(line: &str) -> bool {
    ["fi", "done", "}", "esac", ")"].contains(&line.trim_end_matches(';'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lint(text: &str) -> Vec<String> {
        lint_wrapper(text)
    }

    #[test]
    fn what_swallows_an_exit_code_is_named_with_its_line() {
        let found = lint("#!/bin/bash\nmodule load cuda\neval -- \"$@\"\necho done\n");
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].starts_with("line 3: eval") && found[1].starts_with("line 4: a command after"), "{found:?}");
        assert!(found[2].contains("a shell stays above"), "{found:?}");
        assert!(lint("srun \"$@\" | tee log")[0].contains("pipefail"));
        assert_eq!(lint("set -o pipefail\nsrun \"$@\" | tee log"), Vec::<String>::new());
        assert!(lint("srun \"$@\" || true")[0].contains("thrown away"));
        assert!(lint("srun \"$@\" &\n")[0].contains("background"));
        assert!(lint("\"$@\"")[0].contains("a shell stays"));
        assert!(lint("echo \"$@\"")[0].contains("never runs"));
    }

    #[test]
    fn a_wrapper_that_hands_the_code_on_is_clean() {
        for clean in [
            "#!/bin/bash\n# runs \"$@\" | well\nexec srun \"$@\"\n",
            "exec \"$@\"",
            "srun \"$@\"\nrc=$?\necho \"ended with $rc\"\nexit $rc\n",
            "if true; then\n  exec srun \"$@\"\nfi\n",
            "echo \"a # b\" >&2; srun \"$@\"",
        ] {
            assert_eq!(lint(clean), Vec::<String>::new(), "{clean}");
        }
    }
}
