//! May the files that a recipe needs be downloaded from the hub, with the token that would be used?
//!
//! The hub's own access endpoint is asked, since metadata can be read of what may not be downloaded. "No token", "wrong token",
//! "gated", "absent" and "unreachable" have different remedies, so they are told apart. The token is sent and never shown.

use crate::config::{CodecConfig, Recipe, TextConfig, WeightsConfig};
use crate::{Error, Exit, Result};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where the hub is unless `HF_ENDPOINT` says otherwise.
const ENDPOINT: &str = "https://huggingface.co";
/// A hub that takes longer is not reached: `check` answers in seconds.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Requests for one answer at most.
const REDIRECTS: usize = 4;

/// A repository by what it is and its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Repository {
    pub kind: RepositoryKind,
    /// `owner/name`.
    pub name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RepositoryKind {
    Model,
    Dataset,
}

impl RepositoryKind {
    /// As the hub's addresses and its cache name it.
    fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }
}

impl Repository {
    /// A model by `owner/name`, a dataset by `datasets/owner/name`.
    ///
    /// # Errors
    /// `usage` (exit 2) for anything else.
    pub fn parse(text: &str) -> Result<Self> {
        let (kind, name) = match text.strip_prefix("datasets/") {
            Some(name) => (RepositoryKind::Dataset, name),
            None => (RepositoryKind::Model, text),
        };
        let plain = |part: &str| {
            let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !part.is_empty() && part.chars().all(letter) && !part.starts_with('.')
        };
        match name.split_once('/') {
            Some((owner, rest)) if plain(owner) && plain(rest) => Ok(Self { kind, name: name.to_owned() }),
            _ => Err(Error::usage("usage", format!("{text:?} is no repository: owner/name, or datasets/owner/name"))),
        }
    }

    /// The repository whose place in the hub's cache this path is: a folder `models--owner--name` is part of it.
    fn of_path(path: &Path) -> Option<Self> {
        path.components().find_map(|component| {
            let text = component.as_os_str().to_string_lossy();
            [RepositoryKind::Model, RepositoryKind::Dataset].into_iter().find_map(|kind| {
                let (owner, name) = text.strip_prefix(kind.plural())?.strip_prefix("--")?.split_once("--")?;
                Some(Self { kind, name: format!("{owner}/{name}") })
            })
        })
    }
}

/// Repositories in whose cache a recipe's files would lie, where they are not there yet.
pub fn missing_repositories(recipe: &Recipe) -> Vec<Repository> {
    let mut paths: Vec<&Path> = vec![recipe.dataset()];
    let (CodecConfig::Linear { path } | CodecConfig::WanVae { path }) = recipe.codec();
    paths.push(path);
    let text = match recipe {
        Recipe::Xwam(recipe) => &recipe.text,
        Recipe::Lingbot(recipe) => &recipe.text,
    };
    if let TextConfig::Embeddings { path } = text {
        paths.push(path);
    }
    if let Recipe::Lingbot(recipe) = recipe
        && let WeightsConfig::Official { path } | WeightsConfig::Wan22 { path } = &recipe.weights
    {
        paths.push(path);
    }
    let absent = paths.into_iter().filter(|path| !path.exists());
    let mut found: Vec<Repository> = absent.filter_map(Repository::of_path).collect();
    found.sort();
    found.dedup();
    found
}

/// What is known of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Access {
    pub repository: Repository,
    /// Whose token was used; `None` without one.
    pub identity: Option<String>,
}

/// The hub, and who asks it.
pub struct Hub {
    endpoint: String,
    token: Option<String>,
    agent: ureq::Agent,
}

impl Hub {
    /// The hub and token that its own tools would use: `HF_ENDPOINT`; `HF_TOKEN`, or `HUGGING_FACE_HUB_TOKEN`, or the file
    /// `HF_TOKEN_PATH`, or the file `token` under `HF_HOME`, which is `huggingface` in `XDG_CACHE_HOME` or `~/.cache`.
    pub fn from_environment() -> Self {
        let variable =
            |name: &str| std::env::var(name).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        let folder = |name: &str| variable(name).map(PathBuf::from);
        let cache = || folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
        let home = || folder("HF_HOME").or_else(|| Some(cache()?.join("huggingface")));
        let file = || folder("HF_TOKEN_PATH").or_else(|| Some(home()?.join("token")));
        let stored = || Some(std::fs::read_to_string(file()?).ok()?.trim().to_owned()).filter(|text| !text.is_empty());
        let token = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN")).or_else(stored);
        Self::new(variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned()), token)
    }

    pub fn new(endpoint: impl Into<String>, token: Option<String>) -> Self {
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .http_status_as_error(false)
            .max_redirects(0)
            .build();
        Self { endpoint: endpoint.into().trim_end_matches('/').to_owned(), token, agent: agent.into() }
    }

    /// May this repository's files be downloaded?
    ///
    /// # Errors
    /// `hub_no_token`, `hub_token_refused`, `hub_gated`, `hub_absent`, `hub_token_broken` (exit 78), `hub_unreachable`
    /// (exit 69).
    pub fn access(&self, repository: &Repository) -> Result<Access> {
        let Repository { kind, name } = repository;
        let (status, _) = self.get(&format!("/api/{}/{name}/auth-check", kind.plural()))?;
        let identity = match self.token {
            // Anybody's token may be in the environment of a shared machine: say whose.
            Some(_) if status != 401 => self.whoami()?,
            _ => None,
        };
        let who = match (&identity, &self.token) {
            (Some(identity), _) => format!("the token of {identity}"),
            (None, Some(_)) => "the token".to_owned(),
            (None, None) => "no token".to_owned(),
        };
        let refuse = |code, what: String, hint: &str| Err(Error::refused(code, what).in_place(name).hint(hint));
        match (status, &self.token) {
            (200..=299, _) => Ok(Access { repository: repository.clone(), identity }),
            (401, None) => refuse(
                "hub_no_token",
                "the repository needs a token, and there is none (or it does not exist)".to_owned(),
                "set HF_TOKEN, or log in with the hub's own tool",
            ),
            (401, Some(_)) => refuse(
                "hub_token_refused",
                "the hub does not know the token".to_owned(),
                "it is revoked, expired or cut off: make another and set HF_TOKEN",
            ),
            (403, _) => refuse(
                "hub_gated",
                format!("{who} may not download from this repository: it is gated, or the token is for other things"),
                "ask for access on its page with this account, and let the token read gated repositories",
            ),
            (404, _) => refuse(
                "hub_absent",
                format!("there is no such repository that {who} may see"),
                "check the name; a private one is hidden from other accounts",
            ),
            (other, _) => Err(unreachable(&format!("it answered with status {other}"), &self.endpoint)),
        }
    }

    /// Name of the account that the token belongs to; `None` if the hub does not say.
    fn whoami(&self) -> Result<Option<String>> {
        let (status, body) = self.get("/api/whoami-v2")?;
        let name = || Some(serde_json::from_str::<serde_json::Value>(&body).ok()?.get("name")?.as_str()?.to_owned());
        Ok(if status == 200 { name() } else { None })
    }

    /// Status and the first 64 KiB of the answer, after the hub's own redirects: it keeps the addresses of what was renamed.
    /// Elsewhere the token is not taken.
    fn get(&self, path: &str) -> Result<(u16, String)> {
        let mut url = format!("{}{path}", self.endpoint);
        for _ in 0..REDIRECTS {
            let mut request = self.agent.get(&url);
            if let Some(token) = &self.token {
                // What is no header would come back in words of the client's.
                if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                    return Err(Error::refused("hub_token_broken", "the token has characters that no token has")
                        .hint("set HF_TOKEN to the token alone, without spaces or further lines"));
                }
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let mut response = request.call().map_err(|error| unreachable(&error.to_string(), &self.endpoint))?;
            let status = response.status().as_u16();
            if !matches!(status, 301 | 302 | 307 | 308) {
                let body = response.body_mut().with_config().limit(64 << 10).read_to_string().unwrap_or_default();
                return Ok((status, body));
            }
            let target = response.headers().get("Location").and_then(|value| value.to_str().ok()).unwrap_or_default();
            let inside = target.strip_prefix(&self.endpoint).unwrap_or(target);
            if !inside.starts_with('/') || inside.starts_with("//") {
                return Err(unreachable(&format!("it sends us to {target:?}"), &self.endpoint));
            }
            url = format!("{}{inside}", self.endpoint);
        }
        Err(unreachable("it redirects without end", &self.endpoint))
    }
}

fn unreachable(why: &str, endpoint: &str) -> Error {
    Error::new(Exit::Unavailable, "hub_unreachable", format!("the hub cannot be asked: {why}"))
        .in_place(endpoint)
        .hint("compute nodes often have no way out: ask from a login node; HF_ENDPOINT names another hub")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_are_named_by_words_and_by_places_in_the_cache() {
        let model = Repository { kind: RepositoryKind::Model, name: "robbyant/lingbot-va-base".into() };
        assert_eq!(Repository::parse("robbyant/lingbot-va-base"), Ok(model.clone()));
        assert_eq!(Repository::parse("datasets/a/b").map(|it| it.kind), Ok(RepositoryKind::Dataset));
        for wrong in ["", "a", "a/b/c", "/b", "a/", "a/../b", "a b/c", "a/b?x", "datasets/a"] {
            assert_eq!(Repository::parse(wrong).map_err(|error| error.exit), Err(Exit::Usage), "{wrong}");
        }
        let path = Path::new("/home/x/hub/models--robbyant--lingbot-va-base/snapshots/0123/transformer");
        assert_eq!(Repository::of_path(path), Some(model));
        let path = Path::new("datasets--a--b--c/x");
        assert_eq!(Repository::of_path(path).map(|it| it.name), Some("a/b--c".into()));
        assert_eq!(Repository::of_path(Path::new("/weights/models/x")), None);
    }
}
