//! The one table of keys. Dispatch, the footer, the `?` help and the `:` palette all read it, so none can lie.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// What a key means. The reducer in [`super::app`] knows actions only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    PreviousArm,
    NextArm,
    FirstArm,
    LastArm,
    ToggleMark,
    NextPane,
    PreviousPane,
    PreviousMetric,
    NextMetric,
    Smoothing,
    LogY,
    ZoomIn,
    ZoomOut,
    PanLeft,
    PanRight,
    ResetZoom,
    CursorLeft,
    CursorRight,
    PreviousClip,
    NextClip,
    LogUp,
    LogDown,
    LogPageUp,
    LogPageDown,
    LogFollow,
    Search,
    SearchNext,
    SearchPrevious,
    Stop,
    Kill,
    Resume,
    Plan,
    Refresh,
    Suspend,
    Help,
    Palette,
    /// Close what is open, or drop the cursor; never leaves the console.
    Back,
    Leave,
}

/// Where a binding applies: everywhere, or in one pane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    Everywhere,
    Chart,
    Pictures,
    Log,
}

impl Context {
    /// Heading in the help.
    pub fn heading(self) -> &'static str {
        match self {
            Self::Everywhere => "Everywhere",
            Self::Chart => "In the chart",
            Self::Pictures => "In the pictures",
            Self::Log => "In the log",
        }
    }
}

/// One row of the table.
pub struct Binding {
    pub keys: &'static [(KeyCode, KeyModifiers)],
    /// The keys as people write them.
    pub label: &'static str,
    pub action: Action,
    /// One or two words for the footer; empty if it's not shown there.
    pub short: &'static str,
    /// A line for the help and the palette.
    pub words: &'static str,
    pub context: Context,
    /// Does it change a run? Off under `--read-only`.
    pub acts_on_run: bool,
}

const NONE: KeyModifiers = KeyModifiers::NONE;
const CONTROL: KeyModifiers = KeyModifiers::CONTROL;

macro_rules! binding {
    ($context:ident, $label:literal, $action:ident, $short:literal, $words:literal, [$(($code:expr, $modifiers:expr)),+ $(,)?]) => {
        binding!($context, $label, $action, $short, $words, [$(($code, $modifiers)),+], false)
    };
    ($context:ident, $label:literal, $action:ident, $short:literal, $words:literal, [$(($code:expr, $modifiers:expr)),+ $(,)?], $acts:literal) => {
        Binding {
            keys: &[$(($code, $modifiers)),+],
            label: $label,
            action: Action::$action,
            short: $short,
            words: $words,
            context: Context::$context,
            acts_on_run: $acts,
        }
    };
}

use KeyCode::{BackTab, Char, Down, End, Esc, F, Home, Left, PageDown, PageUp, Right, Tab, Up};

/// The table. Order within a context is the order in the footer; panes come before `Everywhere` in dispatch.
pub const BINDINGS: &[Binding] = &[
    binding!(Chart, "←", PanLeft, "", "Earlier steps", [(Left, NONE), (Char('h'), NONE)]),
    binding!(Chart, "→", PanRight, "pan", "Later steps", [(Right, NONE), (Char('l'), NONE)]),
    binding!(Pictures, "←", PreviousClip, "", "Previous clip", [(Left, NONE), (Char('h'), NONE)]),
    binding!(Pictures, "→", NextClip, "clip", "Next clip", [(Right, NONE), (Char('l'), NONE)]),
    binding!(Log, "↑", LogUp, "", "Scroll up", [(Up, NONE), (Char('k'), NONE)]),
    binding!(Log, "↓", LogDown, "scroll", "Scroll down", [(Down, NONE), (Char('j'), NONE)]),
    binding!(Log, "PgUp", LogPageUp, "", "Scroll up a page", [(PageUp, NONE), (Char('u'), CONTROL)]),
    binding!(Log, "PgDn", LogPageDown, "", "Scroll down a page", [(PageDown, NONE), (Char('d'), CONTROL)]),
    binding!(Log, "G", LogFollow, "follow", "Follow the newest line", [(Char('G'), NONE), (End, NONE)]),
    binding!(Log, "n", SearchNext, "", "Next match", [(Char('n'), NONE)]),
    binding!(Log, "N", SearchPrevious, "", "Previous match", [(Char('N'), NONE)]),
    binding!(
        Everywhere,
        "↑",
        PreviousArm,
        "",
        "Previous arm",
        [(Up, NONE), (Char('k'), NONE), (Left, NONE), (Char('h'), NONE)]
    ),
    binding!(
        Everywhere,
        "↓",
        NextArm,
        "arm",
        "Next arm",
        [(Down, NONE), (Char('j'), NONE), (Right, NONE), (Char('l'), NONE)]
    ),
    binding!(Everywhere, "g", FirstArm, "", "First arm", [(Char('g'), NONE), (Home, NONE)]),
    binding!(Everywhere, "G", LastArm, "", "Last arm", [(Char('G'), NONE), (End, NONE)]),
    binding!(Everywhere, "Space", ToggleMark, "mark", "Draw or hide the selected arm's curves", [(Char(' '), NONE)]),
    binding!(Everywhere, "Tab", NextPane, "pane", "Next pane: arms, chart, pictures, log", [(Tab, NONE)]),
    binding!(Everywhere, "S-Tab", PreviousPane, "", "Previous pane", [(BackTab, NONE)]),
    binding!(Everywhere, "[", PreviousMetric, "", "Previous metric in the chart", [(Char('['), NONE)]),
    binding!(Everywhere, "]", NextMetric, "metric", "Next metric in the chart", [(Char(']'), NONE)]),
    binding!(
        Everywhere,
        "s",
        Smoothing,
        "smooth",
        "Smoothing of the chart: off, 0.3, 0.6, 0.9, 0.98",
        [(Char('s'), NONE)]
    ),
    binding!(Everywhere, "y", LogY, "log y", "Logarithmic y axis", [(Char('y'), NONE)]),
    binding!(Everywhere, "+", ZoomIn, "", "Fewer steps", [(Char('+'), NONE), (Char('='), NONE)]),
    binding!(Everywhere, "-", ZoomOut, "zoom", "More steps", [(Char('-'), NONE)]),
    binding!(Everywhere, "z", ResetZoom, "", "All steps", [(Char('z'), NONE)]),
    binding!(Everywhere, ",", CursorLeft, "", "Read out an earlier step on all charts", [(Char(','), NONE)]),
    binding!(Everywhere, ".", CursorRight, "read", "Read out a later step on all charts", [(Char('.'), NONE)]),
    binding!(Everywhere, "/", Search, "search", "Search the selected arm's log", [(Char('/'), NONE)]),
    binding!(
        Everywhere,
        "S",
        Stop,
        "stop",
        "Stop the selected arm: saves first, can be resumed (asks)",
        [(Char('S'), NONE)],
        true
    ),
    binding!(Everywhere, "R", Resume, "resume", "Resume or start the selected arm (asks)", [(Char('R'), NONE)], true),
    binding!(
        Everywhere,
        "K",
        Kill,
        "kill",
        "Kill the selected arm: saves nothing (asks for its name)",
        [(Char('K'), NONE)],
        true
    ),
    binding!(Everywhere, "P", Plan, "", "Save interval, tries and hours to the end, as measured", [(Char('P'), NONE)]),
    binding!(Everywhere, "?", Help, "help", "This help", [(Char('?'), NONE), (F(1), NONE)]),
    binding!(Everywhere, ":", Palette, "", "Find an action by its words", [(Char(':'), NONE)]),
    binding!(
        Everywhere,
        "q",
        Leave,
        "leave (runs keep running)",
        "Leave the console; runs keep running",
        [(Char('q'), NONE), (Char('c'), CONTROL)]
    ),
    binding!(Everywhere, "Esc", Back, "", "Close what is open, put the cursor away", [(Esc, NONE)]),
    binding!(Everywhere, "ctrl-r", Refresh, "", "Read the runs again and redraw", [(Char('r'), CONTROL), (F(5), NONE)]),
    binding!(Everywhere, "ctrl-z", Suspend, "", "Suspend to the shell; fg comes back", [(Char('z'), CONTROL)]),
];

/// The action of a key in a pane: the pane's own binding first.
pub fn action(key: KeyEvent, pane: Context) -> Option<Action> {
    find(key, pane).or_else(|| find(key, Context::Everywhere)).map(|binding| binding.action)
}

fn find(key: KeyEvent, context: Context) -> Option<&'static Binding> {
    BINDINGS.iter().filter(|binding| binding.context == context).find(|binding| {
        binding.keys.iter().any(|(code, modifiers)| {
            // Shift is part of the character already; terminals differ in whether they also report it.
            *code == key.code && *modifiers == key.modifiers.difference(KeyModifiers::SHIFT)
        })
    })
}

/// The footer's entries for a pane, most useful first: `(keys, words)`. Neighbours like `↑` and `↓` share an entry.
pub fn footer(pane: Context, read_only: bool) -> Vec<(String, &'static str)> {
    let mut entries = Vec::new();
    let contexts = if pane == Context::Everywhere { vec![pane] } else { vec![pane, Context::Everywhere] };
    for context in contexts {
        let mut waiting = String::new();
        for binding in BINDINGS.iter().filter(|binding| binding.context == context) {
            if pane != Context::Everywhere && context == Context::Everywhere && shadowed(binding, pane) {
                waiting.clear();
                continue;
            }
            if binding.acts_on_run && read_only {
                waiting.clear();
                continue;
            }
            let joined = matches!(
                binding.action,
                Action::PanLeft
                    | Action::PreviousClip
                    | Action::LogUp
                    | Action::PreviousArm
                    | Action::PreviousMetric
                    | Action::ZoomIn
                    | Action::CursorLeft
            );
            if joined {
                waiting = binding.label.to_owned();
            } else if !binding.short.is_empty() {
                entries.push((format!("{waiting}{}", binding.label), binding.short));
                waiting.clear();
            }
        }
    }
    entries
}

/// Is every key of this binding taken by the pane?
fn shadowed(binding: &Binding, pane: Context) -> bool {
    binding.keys.iter().all(|(code, modifiers)| find(KeyEvent::new(*code, *modifiers), pane).is_some())
}

/// Bindings whose words or keys contain `query`, ignoring case, in table order.
pub fn matching(query: &str, read_only: bool) -> Vec<&'static Binding> {
    let query = query.trim().to_lowercase();
    BINDINGS
        .iter()
        .filter(|binding| !(read_only && binding.acts_on_run))
        .filter(|binding| {
            query.is_empty() || binding.words.to_lowercase().contains(&query) || binding.short.contains(query.as_str())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PANES: [Context; 4] = [Context::Everywhere, Context::Chart, Context::Pictures, Context::Log];

    #[test]
    fn no_key_means_two_things_in_one_context() {
        for context in PANES {
            let mut seen = Vec::new();
            for binding in BINDINGS.iter().filter(|binding| binding.context == context) {
                for key in binding.keys {
                    assert!(!seen.contains(&key), "{key:?} twice in {context:?}");
                    seen.push(key);
                }
                assert!(!binding.words.is_empty() && !binding.label.is_empty());
            }
        }
    }

    #[test]
    fn every_binding_is_reached_by_its_own_keys() {
        for binding in BINDINGS {
            for (code, modifiers) in binding.keys {
                assert_eq!(action(KeyEvent::new(*code, *modifiers), binding.context), Some(binding.action));
            }
        }
        let shifted = KeyEvent::new(KeyCode::Char('S'), KeyModifiers::SHIFT);
        assert_eq!(action(shifted, Context::Log), Some(Action::Stop));
    }

    #[test]
    fn terminal_and_multiplexer_keys_are_left_alone() {
        for letter in ['s', 'q', 'b', 'a', 'h'] {
            for pane in PANES {
                assert_eq!(action(KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL), pane), None);
            }
        }
    }

    #[test]
    fn read_only_hides_what_changes_runs() {
        for pane in PANES {
            assert!(footer(pane, true).iter().all(|(_, words)| !["stop", "kill", "resume"].contains(words)));
            assert!(footer(pane, false).iter().any(|(_, words)| *words == "kill"));
        }
        assert!(matching("kill", true).is_empty());
        assert_eq!(matching("KILL", false).len(), 1);
    }

    #[test]
    fn neighbours_share_a_footer_entry() {
        let footer = footer(Context::Everywhere, false);
        assert!(footer.iter().any(|(keys, words)| keys == "↑↓" && *words == "arm"), "{footer:?}");
        assert!(footer.iter().any(|(keys, words)| keys == "+-" && *words == "zoom"), "{footer:?}");
    }
}
