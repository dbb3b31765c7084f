//! Which part of a file a `Range` header asks for. Pure.

/// What to send of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// From the first to the last byte, both included.
    Bytes(u64, u64),
    /// Nothing: the file is shorter than what was asked for.
    Unsatisfiable,
}

/// Reads a `Range` header for a file of `length` bytes. What is malformed or asks for several parts is ignored, as the
/// standard allows.
#[must_use]
pub(crate) fn part(header: Option<&str>, length: u64) -> Part {
    let Some(spec) = header.and_then(|header| header.trim().strip_prefix("bytes=")) else {
        return Part::Whole;
    };
    let Some((first, last)) = spec.split_once('-') else { return Part::Whole };
    let (first, last) = (first.trim(), last.trim());
    let parsed =
        |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse::<u64>().ok()).flatten();
    match (parsed(first), parsed(last)) {
        (Some(first), _) if last.is_empty() => within(first, u64::MAX, length),
        (Some(first), Some(last)) if first <= last => within(first, last, length),
        (_, Some(suffix)) if first.is_empty() => {
            if suffix == 0 {
                Part::Unsatisfiable
            } else {
                within(length.saturating_sub(suffix), u64::MAX, length)
            }
        }
        _ => Part::Whole,
    }
}

fn within(first: u64, last: u64, length: u64) -> Part {
    if first >= length { Part::Unsatisfiable } else { Part::Bytes(first, last.min(length - 1)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_the_standard() {
        for (header, expected) in [
            ("bytes=0-4", Part::Bytes(0, 4)),
            ("bytes=3-", Part::Bytes(3, 9)),
            ("bytes=-4", Part::Bytes(6, 9)),
            ("bytes=-40", Part::Bytes(0, 9)),
            ("bytes=5-500", Part::Bytes(5, 9)),
            ("bytes=10-", Part::Unsatisfiable),
            ("bytes=-0", Part::Unsatisfiable),
            ("bytes=5-4", Part::Whole),
            ("bytes=0-1,3-4", Part::Whole),
            ("bytes=a-", Part::Whole),
            ("bytes=+1-2", Part::Whole),
            ("bytes=-", Part::Whole),
            ("lines=1-2", Part::Whole),
            ("bytes=99999999999999999999-", Part::Whole),
        ] {
            assert_eq!(part(Some(header), 10), expected, "{header}");
        }
        assert_eq!(part(None, 10), Part::Whole);
        assert_eq!(part(Some("bytes=0-0"), 0), Part::Unsatisfiable);
        assert_eq!(part(Some("bytes=-5"), 0), Part::Unsatisfiable);
    }
}
