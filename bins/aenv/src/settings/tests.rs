use super::*;

const OPTION: &str = "http://option";
const ENVIRONMENT: &str = "http://environment";
const FILE: &str = "http://file";

fn resolve(option: Option<&str>, environment: Option<&str>, file: Option<&str>) -> Result<Settings, Failure> {
    let overrides = Overrides { api_url: option.map(str::to_owned), ..Overrides::default() };
    let file = file.map(|url| (BTreeMap::from([(API_URL.to_owned(), url.to_owned())]), PathBuf::from("f")));
    let lookup = |name: &str| environment.filter(|_| name == API_URL).map(str::to_owned);
    Settings::resolve(overrides, lookup, || Ok(file))
}

#[test]
fn the_first_place_that_has_a_value_wins() {
    for (option, environment, file, expected) in [
        (Some(OPTION), Some(ENVIRONMENT), Some(FILE), OPTION),
        (None, Some(ENVIRONMENT), Some(FILE), ENVIRONMENT),
        (None, None, Some(FILE), FILE),
        (None, Some(" "), Some(FILE), FILE),
        (None, None, None, DEFAULT_URL),
    ] {
        let settings = resolve(option, environment, file).unwrap();
        assert_eq!(settings.api.to_string(), expected);
        assert_eq!(
            settings.sandboxes.to_string(),
            expected,
            "sandboxes are behind the API's address if not told"
        );
    }
}

#[test]
fn an_address_of_sandboxes_is_not_taken_from_a_weaker_place_than_that_of_the_api() {
    let file = || {
        let urls = [(API_URL, FILE), (SANDBOX_URL, "http://sandboxes")];
        Ok(Some((urls.map(|(name, url)| (name.to_owned(), url.to_owned())).into(), PathBuf::from("f"))))
    };
    let settings = Settings::resolve(Overrides::default(), |_| None, file).unwrap();
    assert_eq!(settings.sandboxes.to_string(), "http://sandboxes");
    let lookup = |name: &str| (name == API_URL).then(|| ENVIRONMENT.to_owned());
    let settings = Settings::resolve(Overrides::default(), lookup, file).unwrap();
    assert_eq!(settings.sandboxes.to_string(), ENVIRONMENT);
    let overrides = Overrides { api_url: Some(OPTION.to_owned()), ..Overrides::default() };
    let lookup = |name: &str| (name == SANDBOX_URL).then(|| ENVIRONMENT.to_owned());
    let settings = Settings::resolve(overrides, lookup, file).unwrap();
    assert_eq!(settings.sandboxes.to_string(), OPTION);
}

#[test]
fn a_file_that_is_not_needed_is_not_read() {
    let overrides = Overrides {
        api_url: Some(OPTION.to_owned()),
        api_key: Some("e2b_00".to_owned()),
        ..Overrides::default()
    };
    assert!(Settings::resolve(overrides, |_| None, || panic!("must not be read")).is_ok());
}

#[test]
fn addresses_that_cannot_be_used_are_refused_with_their_place() {
    for url in [
        "https://host",
        "ftp://host",
        "host:80",
        "/path",
        "http://",
        "http://h?x=1",
        "http://h:99999999",
        "ä",
    ] {
        let failure = resolve(None, Some(url), None).map(|_| ()).expect_err(url);
        assert_eq!(failure.exit(), Exit::USAGE);
        assert!(failure.to_string().contains(API_URL), "{failure}");
        assert!(failure.hint().is_some(), "{failure}");
    }
}

#[test]
fn a_path_of_the_address_is_kept_and_its_slash_dropped() {
    let settings = resolve(Some("http://h:1/base/"), None, None).unwrap();
    assert_eq!(settings.api.join("/x?y=z").unwrap().to_string(), "http://h:1/base/x?y=z");
    let settings = resolve(Some("http://[::1]:8000"), None, None).unwrap();
    assert_eq!(settings.api.to_string(), "http://[::1]:8000");
}

#[test]
fn a_missing_key_says_what_to_run_and_a_key_is_never_shown() {
    let failure = resolve(None, None, None).unwrap().require_key().map(|_| ()).unwrap_err();
    assert!(failure.hint().is_some_and(|hint| hint.contains("make up")), "{failure}");
    let overrides = Overrides { api_key: Some("e2b_secret".to_owned()), ..Overrides::default() };
    let settings = Settings::resolve(overrides, |_| None, || Ok(None)).unwrap();
    assert!(!format!("{settings:?}").contains("secret"));
    let overrides = Overrides { api_key: Some("e2b\n_x".to_owned()), ..Overrides::default() };
    assert!(Settings::resolve(overrides, |_| None, || Ok(None)).is_err());
}

#[test]
fn the_nearest_file_is_found_and_one_of_another_user_refused() {
    let top = tempfile::tempdir().unwrap();
    let below = top.path().join("a/b");
    std::fs::create_dir_all(&below).unwrap();
    std::fs::create_dir(top.path().join(".aenv")).unwrap();
    let path = top.path().join(".aenv/env");
    std::fs::write(&path, "export E2B_API_KEY=e2b_00\n").unwrap();
    assert_eq!(find_file(&below), Some(path.clone()));
    let owner = std::fs::metadata(&path).unwrap().uid();
    assert_eq!(read_file(&path, &[Some(owner)]).unwrap()[API_KEY], "e2b_00");
    assert!(read_file(&path, &[Some(owner + 1), None]).unwrap_err().to_string().contains("another user"));
    std::fs::write(&path, "garbage\n").unwrap();
    assert!(read_file(&path, &[Some(owner)]).unwrap_err().to_string().contains("line 1"));
}
