//! The part of the shell's syntax that a settings file may use.
//!
//! ```text
//! file    = { line "\n" }
//! line    = blanks [ [ "export" blanks ] NAME "=" word blanks ] [ "#" anything ]
//! word    = { plain | "'" anything "'" | '"' { plain | \" | \\ | \$ | \` } '"' | "\" any }
//! ```
//!
//! Pure. What a shell would expand or run (`$`, backticks, `;`, …) is refused, never passed through as text:
//! a file must mean the same here and after `.` in a shell.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

/// Why a line means nothing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SyntaxError {
    line: usize,
    reason: &'static str,
}

impl std::fmt::Display for SyntaxError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for SyntaxError {}

/// Reads all assignments; of two to the same name the later one counts.
///
/// # Errors
/// With the first line that is neither blank, comment nor assignment.
pub(crate) fn parse(text: &str) -> Result<BTreeMap<String, String>, SyntaxError> {
    let mut values = BTreeMap::new();
    for (index, line) in text.lines().enumerate() {
        let fail = |reason| SyntaxError { line: index + 1, reason };
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let assignment = match line.strip_prefix("export") {
            Some(rest) if rest.starts_with([' ', '\t']) => rest.trim_start(),
            _ => line,
        };
        let (name, rest) = assignment.split_once('=').ok_or_else(|| fail("expected NAME=VALUE"))?;
        if !is_name(name) {
            return Err(fail("what stands before `=` is not a name"));
        }
        values.insert(name.to_owned(), word(rest).map_err(fail)?);
    }
    Ok(values)
}

fn is_name(text: &str) -> bool {
    !text.starts_with(|first: char| first.is_ascii_digit())
        && !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Reads one word and what may follow it on its line.
fn word(text: &str) -> Result<String, &'static str> {
    let mut value = String::new();
    let mut rest = text.chars().peekable();
    if text.starts_with('~') {
        return Err("`~` is not expanded here; use single quotes if meant literally");
    }
    while let Some(character) = rest.next() {
        match character {
            '\'' => single_quoted(&mut rest, &mut value)?,
            '"' => double_quoted(&mut rest, &mut value)?,
            '\\' => value.push(rest.next().ok_or("the line ends in a backslash")?),
            ' ' | '\t' => {
                let tail: String = rest.collect();
                let tail = tail.trim_start();
                return if tail.is_empty() || tail.starts_with('#') {
                    Ok(value)
                } else {
                    Err("more than one word; put the value in quotes")
                };
            }
            '$' | '`' => {
                return Err("`$` and backticks are not expanded here; use single quotes if meant literally");
            }
            ';' | '&' | '|' | '<' | '>' | '(' | ')' => return Err("shell operators are not understood here"),
            other => value.push(other),
        }
    }
    Ok(value)
}

fn single_quoted(rest: &mut Peekable<Chars<'_>>, value: &mut String) -> Result<(), &'static str> {
    for character in rest.by_ref() {
        if character == '\'' {
            return Ok(());
        }
        value.push(character);
    }
    Err("a single quote is not closed on its line")
}

fn double_quoted(rest: &mut Peekable<Chars<'_>>, value: &mut String) -> Result<(), &'static str> {
    while let Some(character) = rest.next() {
        match character {
            '"' => return Ok(()),
            '\\' => match rest.next_if(|next| matches!(next, '"' | '\\' | '$' | '`')) {
                Some(escaped) => value.push(escaped),
                None => value.push('\\'),
            },
            '$' | '`' => {
                return Err("`$` and backticks are not expanded here; use single quotes if meant literally");
            }
            other => value.push(other),
        }
    }
    Err("a double quote is not closed on its line")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn value(line: &str) -> Option<String> {
        parse(line).ok()?.remove("A")
    }

    #[test]
    fn understands_what_a_shell_would() {
        for (line, expected) in [
            ("A=b", "b"),
            ("export A=b", "b"),
            ("  export\tA=b  ", "b"),
            ("A=", ""),
            ("A='b c'", "b c"),
            ("A=\"b c\" # why", "b c"),
            ("A=b#c", "b#c"),
            ("A=b=c", "b=c"),
            (r"A=b\ c", "b c"),
            (r#"A="\$x \n""#, r"$x \n"),
            ("A='$x'", "$x"),
            ("A=a'b'\"c\"", "abc"),
            ("# A=x\n\nA=b\r\n", "b"),
            ("A=x\nA=b", "b"),
        ] {
            assert_eq!(value(line).as_deref(), Some(expected), "{line:?}");
        }
    }

    #[test]
    fn refuses_what_it_would_misread() {
        for line in [
            "A", "A =b", "1A=b", "=b", "A=$x", "A=`x`", "A=b c", "A='b", "A=\"b", "A=b\\", "A=b;c",
            "A=\"$x\"", "A=~/x",
        ] {
            assert!(parse(line).is_err(), "{line:?}");
        }
        assert_eq!(parse("A=b\nfoo").unwrap_err().to_string(), "line 2: expected NAME=VALUE");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,200}") {
            let _ = parse(&text);
        }

        #[test]
        fn a_quoted_value_comes_back(text in "[^'\r\n]{0,60}") {
            prop_assert_eq!(value(&format!("export A='{text}'")), Some(text));
        }

        #[test]
        fn an_escaped_value_comes_back(text in "[^\r\n\\p{Z}\\p{C}]{1,60}") {
            let escaped: String = text.chars().flat_map(|character| ['\\', character]).collect();
            prop_assert_eq!(value(&format!("A={escaped}")), Some(text));
        }
    }
}
