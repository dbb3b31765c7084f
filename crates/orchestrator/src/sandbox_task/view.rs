//! What callers see of a sandbox, made of what its task knows.

use super::SandboxTask;
use super::transitions::Kind;
use crate::guest_channel::GuestDialer;
use crate::journal::Step;
use crate::lifecycle::Phase;
use crate::view::{Route, SandboxState, SandboxView, SavedView, Tier};
use std::sync::Arc;

impl SandboxTask {
    /// The sandbox as it is now.
    pub(crate) fn view(&self) -> SandboxView {
        let record = &self.vm.record;
        let state = match (&record.phase, &record.loss) {
            (Phase::Lost, Some(loss)) => {
                SandboxState::Lost { cause: loss.cause, detail: loss.detail.clone() }
            }
            (Phase::Running, _) => SandboxState::Running,
            (Phase::Starting, _) => SandboxState::Starting,
            (Phase::Capturing | Phase::Paused | Phase::Resuming, _) => SandboxState::Paused,
            (Phase::Lost | Phase::Killing, _) => SandboxState::Killing,
        };
        SandboxView {
            id: record.id.clone(),
            template_id: record.template_id.clone(),
            template_name: record.template_name.clone(),
            parent: record.parent.clone(),
            started_at: self.tenancy.started_at,
            end_at: self.tenancy.end_at,
            life_time: self.tenancy.life_time,
            vcpus: record.spec.vcpus,
            memory_mib: record.spec.memory_mib,
            disk_mib: record.disk_mib,
            metadata: self.tenancy.metadata.clone(),
            access_token: self.tenancy.access_token.clone(),
            internet_access: self.tenancy.internet_access,
            on_timeout: self.tenancy.on_timeout,
            auto_resume: self.tenancy.auto_resume,
            woken_by_traffic: state == SandboxState::Paused && self.is_woken_by_traffic(),
            is_changing: self.is_changing(),
            saved: self.saved_view(),
            state,
        }
    }

    fn is_changing(&self) -> bool {
        matches!(self.vm.record.phase, Phase::Capturing | Phase::Resuming)
            || matches!(self.work, Some((Kind::Pause | Kind::Resume, _)))
    }

    /// What a lost sandbox had saved is removed with the rest.
    fn saved_view(&self) -> Option<SavedView> {
        let record = &self.vm.record;
        let shows_none = matches!(record.phase, Phase::Lost | Phase::Killing | Phase::Capturing);
        let save = record.saves.last().filter(|_| !shows_none)?;
        let hot = record.phase == Phase::Paused && self.vm.machine.is_some();
        let pending = self.pending();
        Some(SavedView {
            number: save.number,
            saved_at: save.saved_at,
            mode: save.mode,
            durability: save.durability,
            trouble: pending.as_ref().and_then(|_| self.saving.trouble()).map(|trouble| trouble.cause),
            pending,
            unstored_bytes: record.saves.unstored_bytes(),
            tier: if hot { Tier::Hot } else { Tier::Cold },
            memory_layers: save.memory.as_ref().map_or(0, |memory| memory.chain.layers.len()),
            memory_bytes: save.memory.as_ref().map(|memory| memory.stored_bytes),
            disk_bytes: save.disk_bytes,
            stopped: save.stopped,
            flushed: save.flushed,
            fallback: record.saves.fallback,
        })
    }

    fn pending(&self) -> Option<String> {
        let what = match self.vm.record.saves.next_step(None) {
            None => return None,
            Some(Step::Forget(_)) => "removing earlier saves",
            Some(Step::StoreMemory(_)) => "storing its memory",
            Some(Step::HandOver(..)) => "handing it to a snapshot",
            Some(Step::MakeLocal(_)) => "making it durable",
        };
        Some(match self.saving.trouble() {
            None => what.to_owned(),
            Some(trouble) => format!("{what} (tried again, it failed: {})", trouble.reason),
        })
    }

    /// How to reach it, while it runs: another lifecycle each time this is asked.
    pub(super) fn route(&self) -> Option<Route> {
        let slot = self.vm.slot.as_ref().filter(|_| self.vm.record.phase == Phase::Running)?;
        Some(Route {
            id: self.vm.record.id.clone(),
            lifecycle: self.node.next_lifecycle(),
            dialer: Arc::new(GuestDialer::new(slot)),
            ended: self.ended.clone(),
            access_token: self.tenancy.access_token.clone(),
            guest_address: slot.guest_address.into(),
        })
    }
}
