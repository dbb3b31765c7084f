//! Locations, good and bad. What an opened S3 store does is tested with the repository of snapshots, against a server.

use super::*;
use object_store::{ObjectStoreExt, PutPayload};

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[tokio::test]
async fn objects_of_a_directory_are_files_below_it() {
    let directory = tempfile::tempdir().unwrap();
    let inner = directory.path().join("with blank");
    std::fs::create_dir(&inner).unwrap();
    let store = open(&format!("file://{}/with%20blank/", directory.path().display()), &[]).unwrap();
    assert_eq!(store.directory(), Some(inner.canonicalize().unwrap().as_path()));
    assert!(store.parts().is_none());
    let key = ObjectPath::from("a/b");
    store.objects().put(&key, PutPayload::from_static(b"content")).await.unwrap();
    assert_eq!(std::fs::read(inner.join("a/b")).unwrap(), b"content");
    // Nothing is left of what is removed, not even its directories.
    store.objects().delete(&key).await.unwrap();
    assert_eq!(std::fs::read_dir(&inner).unwrap().count(), 0);
    assert!(inner.is_dir());
}

#[test]
fn a_directory_that_is_not_there_is_not_made() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let error = open(&format!("file://{}", missing.display()), &[]).unwrap_err();
    assert!(matches!(error, LocationError::NoDirectory { .. }), "{error}");
    assert!(!missing.exists());
    std::fs::write(&missing, b"").unwrap();
    let error = open(&format!("file://{}", missing.display()), &[]).unwrap_err();
    assert!(matches!(error, LocationError::NoDirectory { .. }), "{error}");
}

#[test]
fn bad_locations_are_named_and_keep_their_secrets() {
    for wrong in [
        "",
        "/a/path",
        "file://host/path",
        "ftp://host/path",
        "memory:///",
        "https://bucket.example/prefix",
        "s3:///prefix",
        "s3://bucket/prefix?versioning=1",
        "s3://key:secret@bucket/prefix",
    ] {
        let error = open(wrong, &[]).unwrap_err();
        assert!(matches!(error, LocationError::Malformed { .. }), "{wrong:?}: {error:?}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}

#[test]
fn settings_of_s3_are_those_of_the_client() {
    let settings = pairs(&[
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:1"),
        ("aws_allow_http", "true"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "here"),
        // The location's bucket counts.
        ("AWS_BUCKET", "other"),
    ]);
    let store = open("s3://bucket/some/prefix/", &settings).unwrap();
    assert!(store.parts().is_some() && store.directory().is_none());
    assert!(format!("{store:?}").contains("some/prefix"), "{store:?}");

    let error = open("s3://bucket", &pairs(&[("AWS_PAGER", "less")])).unwrap_err();
    assert!(matches!(&error, LocationError::UnknownSetting { name } if name == "AWS_PAGER"), "{error:?}");
    assert!(is_setting("AWS_ENDPOINT_URL") && is_setting("aws_region") && !is_setting("AWS_PAGER"));

    let error = open("s3://bucket", &pairs(&[("AWS_SECRET_ACCESS_KEY", "hidden")])).unwrap_err();
    assert!(matches!(error, LocationError::Refused { .. }), "{error:?}");
    assert!(!error.to_string().contains("hidden"), "{error}");
}
