//! The hub's access check against a server of this test's own: every answer is told apart, the token is sent and never shown.

use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

const TOKEN: &str = "hf_SecretThatNobodyMaySee";

/// Path and Authorization of a request.
type Asked = (String, Option<String>);

/// A hub that answers the access endpoint with one status, and knows the owner of [`TOKEN`].
struct FakeHub {
    endpoint: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl FakeHub {
    fn answering(status: u16) -> Self {
        Self::redirecting(status, "")
    }

    /// The same with a `Location`, for the repository `owner/model` alone.
    fn redirecting(status: u16, location: &str) -> Self {
        let location = location.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
                let path = lines.next().unwrap_or_default().split(' ').nth(1).unwrap_or_default().to_owned();
                let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                let bearer = headers.iter().find_map(|line| {
                    let (name, value) = line.split_once(':')?;
                    name.eq_ignore_ascii_case("authorization").then(|| value.trim().to_owned())
                });
                let (status, body) = match path.as_str() {
                    "/api/whoami-v2" => (200, r#"{"type":"user","name":"somebody-else"}"#),
                    "/api/models/owner/renamed/auth-check" => (200, "OK"),
                    _ => (status, r#"{"error":"no"}"#),
                };
                log.lock().unwrap().push((path, bearer));
                let _ = write!(
                    stream,
                    "HTTP/1.1 {status} Status\r\nLocation: {location}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                    body.len()
                );
            }
        });
        Self { endpoint, asked }
    }
}

fn check(endpoint: &str, token: Option<&str>, repository: &str) -> (Output, Value) {
    let home = tempfile::tempdir().unwrap();
    ask(endpoint, repository, &[("HF_HOME", home.path().to_str().unwrap())], token)
}

/// As [`check`], with further variables.
fn ask(endpoint: &str, repository: &str, variables: &[(&str, &str)], token: Option<&str>) -> (Output, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lbva-tui"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args([
        "--json",
        "check",
        "configs/xwam_5b.yaml",
        "--hub",
        repository,
    ]);
    for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "XDG_CACHE_HOME"] {
        command.env_remove(name);
    }
    command.env("HF_ENDPOINT", endpoint).envs(variables.iter().copied());
    if let Some(token) = token {
        command.env("HF_TOKEN", token);
    }
    let output = command.output().unwrap();
    let document = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!said.contains(TOKEN), "the token is shown: {said}");
    (output, document)
}

#[test]
fn every_answer_of_the_hub_is_told_apart() {
    for (status, token, exit, code) in [
        (200, Some(TOKEN), 0, None),
        (200, None, 0, None),
        (401, None, 78, Some("hub_no_token")),
        (401, Some(TOKEN), 78, Some("hub_token_refused")),
        (403, Some(TOKEN), 78, Some("hub_gated")),
        (404, Some(TOKEN), 78, Some("hub_absent")),
        (500, Some(TOKEN), 69, Some("hub_unreachable")),
    ] {
        let hub = FakeHub::answering(status);
        let (output, document) = check(&hub.endpoint, token, "owner/model");
        assert_eq!(output.status.code(), Some(exit), "{status}: {document}");
        assert_eq!(document["problems"][0]["code"].as_str(), code, "{status}");
        let asked = hub.asked.lock().unwrap();
        assert_eq!(asked[0].0, "/api/models/owner/model/auth-check");
        assert_eq!(asked[0].1, token.map(|token| format!("Bearer {token}")), "the token that is used");
        if status == 200 {
            assert_eq!(document["hub"][0]["identity"].as_str(), token.map(|_| "somebody-else"));
        }
        if status == 403 {
            let what = document["problems"][0]["what"].as_str().unwrap();
            assert!(what.contains("the token of somebody-else"), "{what}");
        }
    }
}

#[test]
fn a_dataset_is_asked_for_as_one_and_a_dead_hub_is_unreachable() {
    let hub = FakeHub::answering(200);
    check(&hub.endpoint, Some(TOKEN), "datasets/owner/data");
    assert_eq!(hub.asked.lock().unwrap()[0].0, "/api/datasets/owner/data/auth-check");
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (output, document) = check(&format!("http://{dead}"), Some(TOKEN), "owner/model");
    assert_eq!((output.status.code(), document["problems"][0]["code"].as_str()), (Some(69), Some("hub_unreachable")));
    let (output, _) = check(&hub.endpoint, Some(TOKEN), "no-owner");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn the_token_is_the_one_that_the_hubs_own_tools_would_use() {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(home.path().join("huggingface")).unwrap();
    std::fs::write(home.path().join("huggingface/token"), format!("{TOKEN}\n")).unwrap();
    std::fs::write(home.path().join("elsewhere"), format!("{TOKEN}2\n")).unwrap();
    let (home, elsewhere) = (home.path().to_str().unwrap(), home.path().join("elsewhere"));
    let elsewhere = elsewhere.to_str().unwrap();
    for (variables, token, wanted) in [
        (vec![("XDG_CACHE_HOME", home)], None, TOKEN.to_owned()),
        (vec![("XDG_CACHE_HOME", home), ("HF_TOKEN_PATH", elsewhere)], None, format!("{TOKEN}2")),
        (vec![("HF_TOKEN_PATH", elsewhere), ("HUGGING_FACE_HUB_TOKEN", "hf_old")], None, "hf_old".to_owned()),
        (vec![("HF_TOKEN_PATH", elsewhere), ("HUGGING_FACE_HUB_TOKEN", "hf_old")], Some(TOKEN), TOKEN.to_owned()),
    ] {
        let hub = FakeHub::answering(200);
        let (output, document) = ask(&hub.endpoint, "owner/model", &variables, token);
        assert_eq!(output.status.code(), Some(0), "{document}");
        let asked = hub.asked.lock().unwrap();
        assert!(
            asked.iter().all(|(_, bearer)| *bearer == Some(format!("Bearer {wanted}"))),
            "{variables:?}: {asked:?}"
        );
    }
}

#[test]
fn a_renamed_repository_is_followed_and_the_token_goes_nowhere_else() {
    let hub = FakeHub::redirecting(307, "/api/models/owner/renamed/auth-check");
    let (output, document) = check(&hub.endpoint, Some(TOKEN), "owner/model");
    assert_eq!(output.status.code(), Some(0), "{document}");
    let asked = hub.asked.lock().unwrap();
    assert!(asked.iter().all(|(_, bearer)| bearer.is_some()) && asked[1].0.contains("renamed"), "{asked:?}");

    let other = FakeHub::answering(200);
    for target in [format!("{}/api/models/owner/renamed/auth-check", other.endpoint), "//127.0.0.1/x".into()] {
        let hub = FakeHub::redirecting(302, &target);
        let (output, document) = check(&hub.endpoint, Some(TOKEN), "owner/model");
        assert_eq!(
            (output.status.code(), document["problems"][0]["code"].as_str()),
            (Some(69), Some("hub_unreachable"))
        );
    }
    assert!(other.asked.lock().unwrap().is_empty());
    let endless = FakeHub::redirecting(302, "/api/models/owner/model/auth-check");
    assert_eq!(check(&endless.endpoint, Some(TOKEN), "owner/model").0.status.code(), Some(69));
}

#[test]
fn what_is_no_token_is_refused_before_it_is_sent() {
    let hub = FakeHub::answering(200);
    let (output, document) = check(&hub.endpoint, Some(&format!("{TOKEN}\nand more")), "owner/model");
    assert_eq!((output.status.code(), document["problems"][0]["code"].as_str()), (Some(78), Some("hub_token_broken")));
    assert!(hub.asked.lock().unwrap().is_empty());
}
