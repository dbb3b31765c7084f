//! Every document that is stored, as version 1 has it: texts that are never edited, since repositories have such ones.
//!
//! Owns nothing.

use crate::aliases::Target;
use crate::document;
use crate::heads::Head;
use crate::manifest::Stored;
use crate::publication::Publication;
use crate::register::Document;
use object_store::path::Path;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Reads `text`, and writes the same again: nothing in it is dropped or renamed.
fn check<T: Serialize + DeserializeOwned>(text: &str) {
    let key = Path::from("golden");
    let read: T = document::read(&key, text.as_bytes()).unwrap();
    let written = document::write(&key, &read).unwrap();
    let value = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
    assert_eq!(value(&written), value(text.as_bytes()));
}

#[test]
fn manifests_of_version_1_are_read_for_ever() {
    check::<Stored>(include_str!("golden/manifest-1.json"));
    check::<Stored>(r#"{"version":1,"state":"expired"}"#);
    check::<Stored>(r#"{"version":1,"state":"deleted"}"#);
}

#[test]
fn other_documents_of_version_1_are_read_for_ever() {
    let digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    check::<Publication>(&format!(r#"{{"version":1,"snapshot":"s1","contents":["{digest}"]}}"#));
    check::<Publication>(r#"{"version":1,"snapshot":null,"contents":[]}"#);
    check::<Document<Target>>(r#"{"version":1,"token":"t2","previous":"t1","value":{"snapshot":"s1"}}"#);
    check::<Document<Target>>(r#"{"version":1,"token":"t1","previous":null,"value":null}"#);
    check::<Document<Head>>(
        r#"{"version":1,"token":"t2","previous":"t1","value":{"owner":"n1","generation":1,"snapshot":"s1"}}"#,
    );
}
