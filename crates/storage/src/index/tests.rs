use super::{Content, Index, IndexBuilder};
use crate::lsmt::{MAXIMUM_LENGTH, Mapping, SECTOR_LIMIT, STORED_LIMIT};
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

/// Mappings with gaps of these sizes between them.
fn mappings() -> impl Strategy<Value = Vec<Mapping>> {
    let gap = prop_oneof![Just(0), 1..5_u64, 100..5000_u64];
    let length = prop_oneof![Just(1), 1..9_u64, Just(MAXIMUM_LENGTH)];
    vec((gap, length, 0..1000_u64, any::<bool>(), any::<u8>()), 0..300).prop_map(|parts| {
        let mut offset = 0;
        let place = |(gap, length, stored, zeroed, tag): (u64, u64, u64, bool, u8)| {
            offset += gap;
            let mapping = Mapping { offset, length, stored, zeroed, tag };
            offset += length;
            mapping
        };
        parts.into_iter().map(place).collect()
    })
}

fn build(mappings: &[Mapping]) -> Index {
    let mut builder = IndexBuilder::default();
    for mapping in mappings {
        builder.push(*mapping).unwrap();
    }
    builder.finish()
}

proptest! {
    #[test]
    fn what_is_found_is_what_a_linear_search_finds(mappings in mappings(), anywhere in 0..6_000_000_u64) {
        let index = build(&mappings);
        prop_assert!(index.iter().eq(mappings.iter().copied()));
        let near = mappings.iter().flat_map(|m| [m.offset.saturating_sub(1), m.offset, m.end() - 1, m.end()]);
        for sector in near.chain([0, anywhere, SECTOR_LIMIT, u64::MAX]) {
            let expected = mappings.iter().position(|m| m.end() > sector).unwrap_or(mappings.len());
            prop_assert_eq!(index.find(sector), expected, "sector {}", sector);
        }
    }

    #[test]
    fn segments_cover_a_range_without_gaps(mappings in mappings(), start in 0..20_000_u64, length in 0..20_000_u64) {
        let index = build(&mappings);
        let mut position = start;
        for segment in index.segments(start..start + length) {
            prop_assert_eq!(segment.start, position);
            prop_assert!(segment.end > segment.start && segment.end <= start + length);
            for sector in [segment.start, segment.end - 1] {
                let expected = match mappings.iter().find(|m| m.offset <= sector && sector < m.end()) {
                    None => Content::Absent,
                    Some(m) if m.zeroed => Content::Zeroed { tag: m.tag },
                    Some(m) => Content::Stored { stored: m.stored + (sector - m.offset), tag: m.tag },
                };
                let found = match segment.content {
                    Content::Stored { stored, tag } => Content::Stored { stored: stored + (sector - segment.start), tag },
                    other => other,
                };
                prop_assert_eq!(found, expected, "sector {}", sector);
            }
            position = segment.end;
        }
        prop_assert_eq!(position, start + length);
    }
}

#[test]
fn what_cannot_be_mapped_is_refused() {
    let good = Mapping { offset: 10, length: 8, stored: 8, zeroed: false, tag: 0 };
    let refused = [
        Mapping { length: 0, ..good },
        Mapping { length: MAXIMUM_LENGTH + 1, ..good },
        Mapping { offset: SECTOR_LIMIT, ..good },
        Mapping { offset: u64::MAX, ..good },
        Mapping { stored: STORED_LIMIT, ..good },
        Mapping { offset: 17, ..good },
        Mapping { offset: 3, ..good },
    ];
    for mapping in refused {
        let mut builder = IndexBuilder::default();
        builder.push(good).unwrap();
        assert!(builder.push(mapping).is_err(), "{mapping:?}");
        assert_eq!(builder.finish(), build(&[good]));
    }
    build(&[good, Mapping { offset: 18, ..good }, Mapping { offset: SECTOR_LIMIT - 8, ..good }]);
}
