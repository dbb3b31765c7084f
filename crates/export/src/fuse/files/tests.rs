//! Names, numbers, and what the kernel remembers.

use super::*;
use aenv_storage::{Image, StorageError};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

#[derive(Debug)]
struct Zeros(u64);

impl Image for Zeros {
    fn size(&self) -> u64 {
        self.0
    }

    fn read_at(&self, buffer: &mut [u8], _: u64) -> Result<(), StorageError> {
        buffer.fill(0);
        Ok(())
    }

    fn next_data(&self, _: u64) -> Result<Option<Range<u64>>, StorageError> {
        Ok(None)
    }
}

fn export(number: u32, name: &str) -> Export {
    Export { number, name: name.to_owned(), owner: 7 }
}

fn zeros(size: u64) -> Content {
    Content::Image(Arc::new(Zeros(size)))
}

#[test]
fn a_size_that_no_file_can_have_is_refused() {
    let files = Files::default();
    let refused = files.add(&export(1, "huge"), zeros(1 << 63)).unwrap_err();
    assert!(matches!(refused, ExportError::Invalid { .. }), "{refused}");
    files.add(&export(1, "huge"), zeros((1 << 63) - 1)).unwrap();
    assert_eq!(files.get(2).unwrap().attributes().size, (1 << 63) - 1);
}

#[test]
fn the_number_of_a_recovered_export_is_free_when_the_kernel_has_forgotten_it() {
    let files = Files::default();
    files.recover(&export(1, "x"), zeros(1)).unwrap();
    assert!(files.look_up("x").is_some());
    files.remove(&export(1, "x"));
    assert!(matches!(files.add(&export(1, "x"), zeros(1)), Err(ExportError::Taken { what: "number", .. })));
    // Of how many look-ups the earlier daemon knew is not known here.
    files.forget(2, 40);
    files.add(&export(1, "x"), zeros(1)).unwrap();
}

#[test]
fn an_export_of_another_name_is_not_removed() {
    let files = Files::default();
    files.add(&export(1, "x"), zeros(1)).unwrap();
    files.remove(&export(1, "y"));
    assert!(files.look_up("x").is_some());
}

#[derive(Debug, Clone)]
enum Step {
    Add(u32, u8),
    Remove(u32, u8),
    LookUp(u8),
    Forget(u32, u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1..5_u32, 0..4_u8).prop_map(|(number, name)| Step::Add(number, name)),
        (1..5_u32, 0..4_u8).prop_map(|(number, name)| Step::Remove(number, name)),
        (0..4_u8).prop_map(Step::LookUp),
        (1..5_u32, 1..3_u64).prop_map(|(number, count)| Step::Forget(number, count)),
    ]
}

proptest! {
    /// Against a model: names and numbers are unique, and no number is given twice while the kernel knows it.
    #[test]
    fn tables_agree_with_a_model(steps in prop::collection::vec(step(), 1..60)) {
        let files = Files::default();
        let mut present = BTreeMap::<u32, String>::new();
        let mut known = BTreeMap::<u32, u64>::new();
        for step in steps {
            match step {
                Step::Add(number, name) => {
                    let name = format!("n{name}");
                    let free = !present.contains_key(&number)
                        && !known.contains_key(&number)
                        && !present.values().any(|other| *other == name);
                    prop_assert_eq!(files.add(&export(number, &name), zeros(1)).is_ok(), free);
                    if free {
                        present.insert(number, name);
                    }
                }
                Step::Remove(number, name) => {
                    let name = format!("n{name}");
                    files.remove(&export(number, &name));
                    if present.get(&number) == Some(&name) {
                        present.remove(&number);
                    }
                }
                Step::LookUp(name) => {
                    let name = format!("n{name}");
                    let number = present.iter().find(|(_, other)| **other == name).map(|(number, _)| *number);
                    prop_assert_eq!(files.look_up(&name).map(|file| file.number), number);
                    if let Some(number) = number {
                        *known.entry(number).or_default() += 1;
                    }
                }
                Step::Forget(number, count) => {
                    files.forget(node_of(number), count);
                    known.entry(number).and_modify(|known| *known = known.saturating_sub(count));
                    known.retain(|_, count| *count > 0);
                }
            }
            let mut listed = Vec::new();
            files.visit(0, false, |file| {
                listed.push((file.number, file.name.clone()));
                true
            });
            prop_assert!(listed.iter().cloned().eq(present.clone()));
            let names: HashSet<_> = listed.iter().map(|(_, name)| name).collect();
            prop_assert_eq!(names.len(), listed.len());
        }
    }
}
