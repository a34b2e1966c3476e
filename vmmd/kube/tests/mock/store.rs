//! Objects of an API server, with the rules that the agent and the controller depend on: versions,
//! uids, finalizers, grace periods.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

/// Which object: `/api/v1` or `/apis/GROUP/VERSION`, resource, namespace, name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub group: String,
    pub resource: String,
    pub namespace: String,
    pub name: String,
}

/// A refusal: HTTP status, reason.
pub type Refusal = (u16, &'static str);

const NOT_FOUND: Refusal = (404, "NotFound");
const CONFLICT: Refusal = (409, "Conflict");
const INVALID: Refusal = (422, "Invalid");

#[derive(Default)]
pub struct Store {
    objects: BTreeMap<Key, Value>,
    version: u64,
    /// Version, type of the event, key and object.
    pub log: Vec<(u64, &'static str, Key, Value)>,
    /// By resource, the version up to which the log is gone.
    forgotten: BTreeMap<String, u64>,
}

/// Options of a deletion.
#[derive(Default)]
pub struct Deletion {
    pub grace: Option<i64>,
    pub uid: Option<String>,
}

impl Store {
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Forgets the history of a resource, as after a compaction.
    pub fn forget(&mut self, resource: &str) {
        self.log.retain(|(_, _, key, _)| key.resource != resource);
        self.forgotten.insert(resource.to_owned(), self.version);
    }

    /// Whether something that happened since a version is not told any more.
    pub fn is_forgotten(&self, resource: &str, since: u64) -> bool {
        self.forgotten
            .get(resource)
            .is_some_and(|version| since < *version)
    }

    pub fn get(&self, key: &Key) -> Result<Value, Refusal> {
        self.objects.get(key).cloned().ok_or(NOT_FOUND)
    }

    /// All of a resource; of all namespaces when the key names none.
    pub fn list(&self, of: &Key) -> Vec<Value> {
        let same = |key: &Key| {
            (&key.group, &key.resource) == (&of.group, &of.resource)
                && (of.namespace.is_empty() || key.namespace == of.namespace)
        };
        let found = self.objects.iter().filter(|(key, _)| same(key));
        found.map(|(_, value)| value.clone()).collect()
    }

    pub fn create(&mut self, mut key: Key, mut object: Value) -> Result<Value, Refusal> {
        key.name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if self.objects.contains_key(&key) {
            return Err((409, "AlreadyExists"));
        }
        let metadata = &mut object["metadata"];
        metadata["uid"] = format!("uid-{}", self.version + 1).into();
        metadata["generation"] = 1.into();
        metadata["creationTimestamp"] = now(0).into();
        if !key.namespace.is_empty() {
            metadata["namespace"] = key.namespace.clone().into();
        }
        if key.resource == "virtualmachines" {
            object.as_object_mut().unwrap().remove("status");
        }
        if key.resource == "pods" {
            object["status"] = json!({"phase": "Pending"});
        }
        Ok(self.put(&key, "ADDED", object))
    }

    /// Over the version that it names, when it names one.
    pub fn replace(&mut self, key: &Key, subresource: &str, mut object: Value) -> Result<Value, Refusal> {
        let old = self.get(key)?;
        check(&old, &object["metadata"])?;
        if key.resource == "pods" && has_two_of_a_family(&object["status"]["podIPs"]) {
            return Err(INVALID);
        }
        let part = |object: &Value| object.get("status").cloned();
        let mut new = old.clone();
        if subresource == "status" {
            new["status"] = part(&object).unwrap_or_default();
        } else {
            let kept = part(&old);
            if let (Some(kept), true) = (kept, has_status(key)) {
                object["status"] = kept;
            }
            new = object;
            for name in [
                "uid",
                "creationTimestamp",
                "deletionTimestamp",
                "deletionGracePeriodSeconds",
                "generation",
            ] {
                match old["metadata"].get(name) {
                    Some(value) => new["metadata"][name] = value.clone(),
                    None => drop(new["metadata"].as_object_mut().unwrap().remove(name)),
                }
            }
            if new["spec"] != old["spec"] {
                new["metadata"]["generation"] =
                    (old["metadata"]["generation"].as_i64().unwrap_or(0) + 1).into();
            }
        }
        if new == old {
            return Ok(old);
        }
        Ok(self.put_or_remove(key, new))
    }

    /// A JSON merge patch (RFC 7396).
    pub fn patch(&mut self, key: &Key, subresource: &str, patch: &Value) -> Result<Value, Refusal> {
        let mut object = self.get(key)?;
        check(&object, &patch["metadata"])?;
        merge(&mut object, patch);
        // As the real API server writes it for a container without a last state.
        let containers = object.pointer_mut("/status/containerStatuses");
        for container in containers.and_then(Value::as_array_mut).into_iter().flatten() {
            if container["lastState"].is_null() {
                container["lastState"] = json!({});
            }
        }
        self.replace(key, subresource, object)
    }

    pub fn delete(&mut self, key: &Key, deletion: &Deletion) -> Result<Value, Refusal> {
        let mut object = self.get(key)?;
        if deletion.uid.is_some() && deletion.uid.as_deref() != object["metadata"]["uid"].as_str() {
            return Err(CONFLICT);
        }
        let bound = object["spec"]["nodeName"]
            .as_str()
            .is_some_and(|name| !name.is_empty());
        let over = matches!(object["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let default = object["spec"]["terminationGracePeriodSeconds"]
            .as_i64()
            .unwrap_or(30);
        let mut grace = match key.resource.as_str() {
            "pods" if bound && !over => deletion.grace.unwrap_or(default),
            _ => 0,
        };
        let metadata = &mut object["metadata"];
        if let Some(earlier) = metadata["deletionGracePeriodSeconds"].as_i64() {
            grace = grace.min(earlier);
        }
        let same = metadata["deletionGracePeriodSeconds"].as_i64() == Some(grace);
        if !same {
            metadata["deletionGracePeriodSeconds"] = grace.into();
            metadata["deletionTimestamp"] = now(grace).into();
        }
        Ok(self.put_or_remove(key, object))
    }

    /// Removes it regardless of finalizers, as an edit of the finalizers does.
    pub fn tear_out(&mut self, key: &Key) {
        let object = self.objects.remove(key).expect("it is there");
        self.note(key, "DELETED", object);
    }

    fn put_or_remove(&mut self, key: &Key, object: Value) -> Value {
        let metadata = &object["metadata"];
        let finalizers = metadata["finalizers"]
            .as_array()
            .is_some_and(|list| !list.is_empty());
        if metadata["deletionGracePeriodSeconds"] == 0 && !finalizers {
            self.objects.remove(key);
            return self.note(key, "DELETED", object);
        }
        self.put(key, "MODIFIED", object)
    }

    fn put(&mut self, key: &Key, kind: &'static str, object: Value) -> Value {
        let object = self.note(key, kind, object);
        self.objects.insert(key.clone(), object.clone());
        object
    }

    fn note(&mut self, key: &Key, kind: &'static str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.log.push((self.version, kind, key.clone(), object.clone()));
        object
    }
}

fn has_status(key: &Key) -> bool {
    matches!(key.resource.as_str(), "pods" | "nodes" | "virtualmachines")
}

/// Whether a pod has more than one IPv4 address, or more than one IPv6 address.
fn has_two_of_a_family(ips: &Value) -> bool {
    let ips = ips.as_array().into_iter().flatten();
    let families: Vec<_> = ips
        .map(|ip| ip["ip"].as_str().unwrap_or_default().contains(':'))
        .collect();
    let distinct: BTreeSet<_> = families.iter().collect();
    distinct.len() < families.len()
}

fn check(old: &Value, metadata: &Value) -> Result<(), Refusal> {
    for name in ["uid", "resourceVersion"] {
        if metadata
            .get(name)
            .is_some_and(|wanted| !wanted.is_null() && *wanted != old["metadata"][name])
        {
            return Err(CONFLICT);
        }
    }
    Ok(())
}

fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    for (name, change) in changes {
        if change.is_null() {
            object.as_object_mut().unwrap().remove(name);
        } else {
            merge(&mut object[name], change);
        }
    }
}

/// That many seconds from now.
fn now(seconds: i64) -> String {
    let time = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds);
    jiff::Timestamp::from_second(time.as_second())
        .unwrap()
        .to_string()
}
