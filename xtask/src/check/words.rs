//! Words that must not be committed: paths of one machine, and marks of unfinished work. Owns the list.

use super::Finding;

/// Pieces of a forbidden word, joined when used so that this file does not contain it; and what is wrong with it.
const FORBIDDEN: &[(&[&str], &str)] = &[
    (&["/wo", "rk/"], "a path of one machine"),
    (&["/ro", "ot/.cargo"], "a path of one machine"),
    (&["/ro", "ot/.pyenv"], "a path of one machine"),
    (&["FIX", "ME"], "unfinished work: finish it, or say what is missing in docs/not-yet.md"),
    (&["TO", "DO:"], "unfinished work: finish it, or say what is missing in docs/not-yet.md"),
    (&["PyPI mir", "ror"], "a host of one network"),
];

/// Judges one text file.
pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    if path.ends_with(".lock") || path.ends_with("package-lock.json") {
        return Vec::new();
    }
    let forbidden: Vec<(String, &str)> =
        FORBIDDEN.iter().map(|(pieces, why)| (pieces.concat(), *why)).collect();
    let mut findings = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for (word, why) in forbidden.iter().filter(|(word, _)| contains_at_boundary(line, word)) {
            findings.push(Finding::error(path, format!("line {}: `{word}`: {why}", number + 1)));
        }
    }
    findings
}

/// Whether the word stands in the line and no letter or digit stands before it: a longer path is another one.
fn contains_at_boundary(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line.get(..at).and_then(|start| start.chars().next_back());
        !before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '}' | '.' | ')'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forbidden_words_are_found_with_their_line() {
        for (pieces, _) in FORBIDDEN {
            let found = check("a.md", &format!("first\nsee {}x\n", pieces.concat()));
            assert!(found[0].message.starts_with("line 2"), "{found:?}");
        }
    }

    #[test]
    fn longer_paths_and_lock_files_are_fine() {
        let path = ["/wo", "rk/"].concat();
        assert_eq!(check("a.rs", &format!("run{path}x ${{dir}}{path}x")), []);
        assert_eq!(check("Cargo.lock", &path), []);
    }
}
